"""Masks, images and contours side by side."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nbgpu.recipes import png
from nbgpu.recipes.lithography.contours import contours

TRUE, FOUND = "#0072b2", "#d55e00"
_INCHES, _DPI = 1.6, 100


def row(images: Tensor, highest: float, colours: str) -> str:
    """(N, H, W) side by side, 0 to `highest`, with the first row below."""

    def draw(axes: Axes, index: int) -> None:
        axes.imshow(images[index].numpy(), cmap=colours, vmin=0, vmax=highest, origin="lower")

    return _drawn(len(images), draw)


def contours_over(masks: Tensor, true: Tensor, found: Tensor, threshold: float) -> str:
    """The contours of two images (N, H, W) at a threshold over the masks: the true ones blue, the found ones orange."""
    height, width = masks.shape[1:]

    def draw(axes: Axes, index: int) -> None:
        axes.imshow(
            masks[index].numpy(), cmap="gray_r", vmin=0, vmax=4, origin="lower", extent=(0, width, 0, height)
        )
        for image, colour, dashes in ((true, TRUE, "-"), (found, FOUND, "--")):
            for line in contours(image[index], threshold, pixel_nm=1.0):
                axes.plot(*np.asarray(line).T, dashes, color=colour, linewidth=0.9)

    return _drawn(len(masks), draw)


def _drawn(num_tiles: int, draw: Callable[[Axes, int], None]) -> str:
    figure = Figure(figsize=(_INCHES * num_tiles, _INCHES), dpi=_DPI)
    for index in range(num_tiles):
        axes = figure.add_axes((index / num_tiles, 0, 0.97 / num_tiles, 1))
        axes.set_axis_off()
        draw(axes, index)
    return png.of_figure(figure)
