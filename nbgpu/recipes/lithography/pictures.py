"""Masks, images and contours side by side."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nbgpu.recipes import data_uri
from nbgpu.recipes.lithography.contours import contours
from nbgpu.recipes.lithography.edges import Cut
from nbgpu.recipes.lithography.overlay import largest_shown_nm, overlay

TRUE, FOUND = "#0072b2", "#d55e00"
_DPI = 100


def row(images: Tensor, highest: float, colours: str) -> str:
    """Draw images (N, H, W) side by side, with colours from 0 to `highest` and the first row at the
    bottom."""

    def draw(axes: Axes, index: int) -> None:
        axes.imshow(images[index].numpy(), cmap=colours, vmin=0, vmax=highest, origin="lower")

    return _drawn(len(images), draw)


def contours_over(masks: Tensor, true: Tensor, found: Tensor, threshold: float) -> str:
    """Draw the contours of two sets of images (N, H, W) at a threshold over the masks: the true contours in
    blue, the found ones in orange."""
    height, width = masks.shape[1:]

    def draw(axes: Axes, index: int) -> None:
        axes.imshow(
            masks[index].numpy(), cmap="gray_r", vmin=0, vmax=4, origin="lower", extent=(0, width, 0, height)
        )
        for image, colour, dashes in ((true, TRUE, "-"), (found, FOUND, "--")):
            for line in contours(image[index], threshold, pixel_nm=1.0):
                axes.plot(*np.asarray(line).T, dashes, color=colour, linewidth=0.9)

    return _drawn(len(masks), draw)


def errors_over(
    designs: Tensor, images: Tensor, threshold: float, pixel_nm: float, margin: int = 0
) -> tuple[str, float]:
    """Draw what images (N, H, W) print over the designs, with the errors at the designs' edges and the widths
    along the middle row; without so many pixels on every side.

    Returns the picture and the error in nm that has the strongest colours.
    """
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
        axes.set_xlim(beside, width - beside)
        axes.set_ylim(beside, height - beside)

    return _drawn(len(shown), draw, inches=2.4), largest


def _drawn(num_tiles: int, draw: Callable[[Axes, int], None], inches: float = 1.6) -> str:
    figure = Figure(figsize=(inches * num_tiles, inches), dpi=_DPI)
    for index in range(num_tiles):
        axes = figure.add_axes((index / num_tiles, 0, 0.97 / num_tiles, 1))
        axes.set_axis_off()
        draw(axes, index)
    return data_uri.of_figure(figure)
