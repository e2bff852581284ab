"""Figures of images side by side, with the names and units of their axes and a colour bar, and the conversion
of figures to PNG data URIs, as results and pages have them."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from numpy.typing import NDArray
from torch import Tensor

from nbgpu.text.palette import TEXT_COLOR

_DPI = 100
_LEAST_TILE_PX = 112
_LEFT_PX, _BOTTOM_PX, _TOP_PX, _RIGHT_PX = 48, 36, 8, 10
_TITLE_PX = 16
_GAP_PX = 14
_BAR_PX = 9
_BAR_LABELS_PX = 52
BAR_AND_LABELS_PX = _GAP_PX + _BAR_PX + _BAR_LABELS_PX
_SHORTEST_BAR_LABEL_PX = 150
FONT_PT = 7.5

Pixels = NDArray[Any]
Draw = Callable[[Axes, int], None]


@dataclass(frozen=True)
class Colours:
    """The meaning of the colours of an image."""

    quantity: str
    """The quantity with its unit, such as 'error, nm'."""
    lowest: float
    highest: float
    map: str = "gray"
    """The name of matplotlib's colour map."""


@dataclass(frozen=True)
class Grid:
    """The axes of an image."""

    unit: str = "voxels"
    edge: float = 1.0
    """The length of a pixel's edge in `unit`."""
    start: float = 0.0
    """The coordinate of the left and of the lower end of the image in `unit`."""
    names: tuple[str, str] = ("x", "y")
    """The names of the horizontal and the vertical axis."""
    goes_up: bool = True
    """Whether the vertical axis points up, so that the first row of pixels is the lowest."""

    def extent(self, image: Pixels) -> tuple[float, float, float, float]:
        """Return the left, right, lower and upper end of an image (H, W) in `unit`."""
        height, width = (self.start + self.edge * length for length in image.shape[:2])
        return (self.start, width, *((self.start, height) if self.goes_up else (height, self.start)))


def row(
    images: Sequence[Pixels],
    colours: Colours | None,
    grids: Grid | Sequence[Grid] = Grid(),
    titles: Sequence[str] = (),
    draw_over: Draw | None = None,
    least_px: int = _LEAST_TILE_PX,
) -> Figure:
    """Draw images (H, W) side by side. Each pixel of an image becomes a square of n x n pixels of the screen,
    where n is a whole number, so that no resampling blurs the image.

    Args:
        images: the images, at least one.
        colours: the meaning of the colours; None if the images are drawn by `draw_over` alone.
        grids: the axes of all images, or of each one.
        titles: a line above each image; empty for none.
        draw_over: called with the axes of each image and the image's number.
        least_px: the least edge of an image on the screen in pixels.
    """
    same = isinstance(grids, Grid)
    grid_of_each = [grids] * len(images) if isinstance(grids, Grid) else grids
    sizes = [_size_px(image, least_px) for image in images]
    gaps = _GAP_PX if same else _LEFT_PX
    across = sum(width for _, width in sizes) + gaps * (len(images) - 1)
    down = max(height for height, _ in sizes)
    width = _LEFT_PX + across + (BAR_AND_LABELS_PX if colours is not None else _RIGHT_PX)
    height = _BOTTOM_PX + down + _TOP_PX + (_TITLE_PX if titles else 0)
    figure = figure_of(width, height)
    left_px = _LEFT_PX
    for index, (image, size, grid) in enumerate(zip(images, sizes, grid_of_each, strict=True)):
        image_height, image_width = size
        bottom = _BOTTOM_PX + down - image_height
        place = (left_px / width, bottom / height, image_width / width, image_height / height)
        axes = figure.add_axes(place, label=f"image {index}")
        if colours is not None:
            axes.imshow(
                image,
                cmap=colours.map,
                vmin=colours.lowest,
                vmax=colours.highest,
                origin="lower" if grid.goes_up else "upper",
                extent=grid.extent(image),
                interpolation="nearest",
                aspect="auto",
            )
        if draw_over is not None:
            draw_over(axes, index)
        _name_axes(axes, image, grid, with_vertical=index == 0 or not same)
        if titles:
            axes.set_title(titles[index], fontsize=FONT_PT, pad=3)
        left_px += image_width + gaps
    if colours is not None:
        draw_bar(figure, colours, _BOTTOM_PX, down)
    return figure


def figure_of(width_px: int, height_px: int) -> Figure:
    """Return an empty figure of this size in pixels of the screen."""
    return Figure(figsize=(width_px / _DPI, height_px / _DPI), dpi=_DPI)


def draw_bar(figure: Figure, colours: Colours, bottom_px: int, height_px: int) -> None:
    """Draw the colour bar at the right of a figure, where `BAR_AND_LABELS_PX` are reserved for it."""
    width, height = figure.get_size_inches() * _DPI
    left_px = width - _BAR_LABELS_PX - _BAR_PX
    place = (left_px / width, bottom_px / height, _BAR_PX / width, height_px / height)
    axes = figure.add_axes(place, label="<colorbar>")
    scale = ScalarMappable(Normalize(colours.lowest, colours.highest), colours.map)
    bar = figure.colorbar(scale, cax=axes, ticks=[colours.lowest, colours.highest])
    bar.ax.set_yticklabels([f"{value:.3g}" for value in (colours.lowest, colours.highest)])
    bar.ax.tick_params(labelsize=FONT_PT, length=2, pad=2)
    # The label runs along the bar, so that it must be smaller if the bar is short.
    shrink = min(1.0, height_px / _SHORTEST_BAR_LABEL_PX + 0.15)
    bar.set_label(colours.quantity, fontsize=FONT_PT * shrink, labelpad=-4)
    bar.outline.set_linewidth(0.5)


def _name_axes(axes: Axes, image: Pixels, grid: Grid, with_vertical: bool) -> None:
    """Write the names of the axes, and the coordinates of their ends. `with_vertical` is false for an image
    that has its vertical axis in common with the image to its left."""
    left, right, lower, upper = grid.extent(image)
    axes.set_xlim(left, right)
    axes.set_ylim(lower, upper)
    axes.set_xticks([left, right], [f"{left:g}", f"{right:g}"])
    # The labels are inside the width of the image, so that those of neighbours do not overlap.
    first, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    axes.set_yticks([lower, upper], [f"{lower:g}", f"{upper:g}"] if with_vertical else [])
    if with_vertical:
        first, last = axes.get_yticklabels()
        first.set_verticalalignment("bottom")
        last.set_verticalalignment("top")
    axes.tick_params(labelsize=FONT_PT, length=2, pad=2)
    axes.set_xlabel(f"{grid.names[0]}, {grid.unit}", fontsize=FONT_PT, labelpad=-6)
    if with_vertical:
        axes.set_ylabel(f"{grid.names[1]}, {grid.unit}", fontsize=FONT_PT, labelpad=-10)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)


def _size_px(image: Pixels, least_px: int) -> tuple[int, int]:
    """Return (height, width) of an image on the screen in pixels: a whole multiple of its size, and at least
    `least_px` wide."""
    height, width = image.shape[:2]
    times = max(1, math.ceil(least_px / width))
    return times * height, times * width


def figure_uri(figure: Figure) -> str:
    """Return a figure as a PNG data URI, with a transparent background and grey text, which can be read on
    white and on dark pages."""
    _make_transparent(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _make_transparent(figure: Figure) -> None:
    """Make the background of a figure transparent, and its axes and black text grey."""
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.tick_params(which="both", colors=TEXT_COLOR)
        for spine in axes.spines.values():
            spine.set_edgecolor(TEXT_COLOR)
    for legend in figure.findobj(Legend):
        legend.set_frame_on(False)
    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(TEXT_COLOR)


def middle_slices_uri(volumes: Tensor, colours: Colours) -> str:
    """Return the middle slices of volumes (N, D, H, W) side by side as a data URI. They are perpendicular to
    the last axis, with the H axis pointing up."""
    return row_of_slices_uri(volumes[..., volumes.shape[-1] // 2], colours)


def row_of_slices_uri(slices: Tensor, colours: Colours) -> str:
    """Return slices (N, D, H) side by side as a data URI, with the H axis pointing up."""
    return figure_uri(row([one.T.numpy() for one in slices], colours))
