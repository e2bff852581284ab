"""Pictures of microstructures and of their correlations."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nbgpu.recipes import side_by_side
from nbgpu.recipes.side_by_side import Colours, Grid

_LEAST_WIDTH_PX = 160
_BLOCK_MARGIN_PX = 20
_COLOURS = "viridis"
_PIXEL = {2: "pixels", 3: "voxels"}


def middle_slices(phases: Tensor) -> list[Tensor]:
    """Return a picture itself, or the middle slices of a volume perpendicular to its three directions."""
    if phases.ndim == 2:
        return [phases]
    return [phases.select(direction, phases.shape[direction] // 2) for direction in range(3)]


def slices(phases: Tensor, colours: Colours) -> str:
    """Draw a picture (H, W), or the middle slices of a volume (D, H, W) side by side, with the first row at
    the top; return a PNG as a data URI."""
    shown = middle_slices(phases)
    # A slice perpendicular to an axis shows the other two, the first of them downwards.
    axes = [(1, 0)] if phases.ndim == 2 else [(2, 1), (2, 0), (1, 0)]
    pixel = _PIXEL[phases.ndim]
    grids = [Grid(pixel, names=(f"axis {across}", f"axis {down}"), goes_up=False) for across, down in axes]
    figure = side_by_side.row([one.numpy() for one in shown], colours, grids, least_px=_LEAST_WIDTH_PX)
    return side_by_side.figure_uri(figure)


def correlations(target: Tensor, found: Tensor) -> str:
    """Draw the two-point correlations (2L - 1, 2L - 1) of a target and of the field that was found side by
    side, with lag 0 in the middle; return a PNG as a data URI."""
    colours = Colours("probability", 0, float(target.max()), _COLOURS)
    grid = Grid("pixels", start=-len(target) / 2, names=("distance", "distance"))
    images = [target.numpy(), found.numpy()]
    return side_by_side.figure_uri(
        side_by_side.row(images, colours, grid, ("target", "found"), least_px=_LEAST_WIDTH_PX)
    )


def block(volume: Tensor, colours: Colours, width_px: int = 320) -> str:
    """Draw a volume (D, H, W) as a block seen from above one of its edges: three faces, each in a different
    shade, with the lengths along its edges in voxels; return a PNG as a data URI."""
    pixels = _block(volume, colours, width_px)
    height_px = len(pixels)
    figure = side_by_side.figure_of(
        _BLOCK_MARGIN_PX + width_px + side_by_side.BAR_AND_LABELS_PX, height_px + 2 * _BLOCK_MARGIN_PX
    )
    across, up = figure.get_size_inches() * figure.dpi
    place = (_BLOCK_MARGIN_PX / across, _BLOCK_MARGIN_PX / up, width_px / across, height_px / up)
    axes = figure.add_axes(place, label="block")
    axes.set_axis_off()
    axes.imshow(pixels, interpolation="nearest", aspect="auto")
    # Labels beside the edge at the left and the two edges in front, one for each axis: (x, y, angle).
    edges = ((-0.03, 0.5, 90), (0.22, 0.08, -30), (0.78, 0.08, 30))
    for axis, (x, y, degrees) in enumerate(edges):
        axes.text(
            x,
            y,
            f"axis {axis}, {volume.shape[axis]} voxels",
            rotation=degrees,
            horizontalalignment="center",
            verticalalignment="center",
            fontsize=side_by_side.FONT_PT,
            transform=axes.transAxes,
        )
    side_by_side.draw_bar(figure, colours, _BLOCK_MARGIN_PX, height_px)
    return side_by_side.figure_uri(figure)


def _block(volume: Tensor, colours: Colours, width: int) -> NDArray[np.float64]:
    """Draw three faces of a volume (D, H, W) in isometric projection, and return the picture in RGBA,
    (height, width, 4); pixels outside the faces are transparent."""
    across, down = math.cos(math.pi / 6), math.sin(math.pi / 6)
    height = round(width / (2 * across) * (1 + 2 * down))
    x = np.linspace(-across, across, width)[None, :].repeat(height, axis=0)
    y = np.linspace(-1, 2 * down, height)[:, None].repeat(width, axis=1)
    colour_of = matplotlib.colormaps[colours.map]
    image = np.zeros((height, width, 4))
    # The point (a, b, c) of a block of edge 1, with c upwards, appears at ((a - b) across, (a + b) down - c).
    # Each face fixes one of a, b and c at 1; the other two follow from x and y.
    total, difference = (y + 1) / down, x / across
    faces = [
        ((total + difference) / 2, (total - difference) / 2, np.ones_like(x), 1.0),
        (np.ones_like(x), 1 - difference, (2 - difference) * down - y, 0.8),
        (1 + difference, np.ones_like(x), (2 + difference) * down - y, 0.6),
    ]
    voxels = volume.double().numpy()
    for a, b, c, light in faces:
        is_seen = (np.minimum(np.minimum(a, b), c) >= 0) & (np.maximum(np.maximum(a, b), c) <= 1)
        # The first axis points down, the others along the edges of the top face.
        indices = tuple(
            np.minimum((position[is_seen] * length).astype(int), length - 1)
            for position, length in zip((1 - c, a, b), voxels.shape, strict=True)
        )
        shares = (voxels[indices] - colours.lowest) / (colours.highest - colours.lowest)
        image[is_seen] = colour_of(shares) * np.array([light, light, light, 1.0])
    return image.clip(0, 1)
