"""Masks, images and contours side by side."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from nbgpu.recipes import data_uri, side_by_side
from nbgpu.recipes.lithography.contours import contours
from nbgpu.recipes.lithography.edges import Cut
from nbgpu.recipes.lithography.overlay import ERROR_COLOURS, largest_shown_nm, overlay
from nbgpu.recipes.lithography.tiles import without_margin
from nbgpu.recipes.side_by_side import Colours, Grid

TRUE, FOUND = "#0072b2", "#d55e00"
_OVERLAY_PX = 240


def row(images: Tensor, colours: Colours, grid: Grid) -> str:
    """Draw images (N, H, W) side by side."""
    return data_uri.of_figure(side_by_side.row(list(images.numpy()), colours, grid))


def contours_over(masks: Tensor, true: Tensor, found: Tensor, threshold: float, pixel_nm: float) -> str:
    """Draw the contours of two sets of images (N, H, W) at a threshold over the masks: the true contours in
    blue, the found ones in orange."""
    grid = Grid("nm", pixel_nm)

    def draw(axes: Axes, index: int) -> None:
        mask = masks[index].numpy()
        axes.imshow(
            mask, cmap="gray_r", vmin=0, vmax=4, origin="lower", extent=grid.extent(mask), aspect="auto"
        )
        for image, colour, dashes in ((true, TRUE, "-"), (found, FOUND, "--")):
            for line in contours(image[index], threshold, pixel_nm):
                axes.plot(*np.asarray(line).T, dashes, color=colour, linewidth=0.9)

    return data_uri.of_figure(side_by_side.row(list(masks.numpy()), None, grid, draw_over=draw))


def errors_over(designs: Tensor, images: Tensor, threshold: float, pixel_nm: float, margin: int = 0) -> str:
    """Draw what images (N, H, W) print over the designs, with the errors at the designs' edges and the widths
    along the middle row; without so many pixels on every side."""
    height, width = (length * pixel_nm for length in designs.shape[1:])
    beside = margin * pixel_nm
    middle = Cut((beside, height / 2), (width - beside, height / 2))
    shown = [
        overlay(design, image, threshold, pixel_nm, cuts=[middle])
        for design, image in zip(designs, images, strict=True)
    ]
    largest = largest_shown_nm([one.errors_nm for one in shown])

    def draw(axes: Axes, index: int) -> None:
        shown[index].draw(axes, largest, dot=3.0)
        axes.set_aspect("auto")

    colours = Colours("error, nm", -largest, largest, ERROR_COLOURS)
    inner = without_margin(designs, margin)
    grid = Grid("nm", pixel_nm, start=beside)
    figure = side_by_side.row(list(inner.numpy()), colours, grid, draw_over=draw, least_px=_OVERLAY_PX)
    return data_uri.of_figure(figure)
