"""Survival curves of risk groups, and projections of volumes from low to high risk, as PNG data URIs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from nbgpu.recipes import side_by_side
from nbgpu.recipes.side_by_side import Colours, row
from nbgpu.recipes.survival.metrics import Flags, Floats, kaplan_meier
from nbgpu.text.palette import rank_color

_DPI = 100


def curves(times: Floats, events: Flags, groups: NDArray[np.intp], num_groups: int) -> str:
    """Draw the Kaplan-Meier curve of each risk group, the lowest risk first, with a tick at each censored
    time."""
    figure = Figure(figsize=(6, 4), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot(
        xlabel="time, in the unit of the data", ylabel="share with no event", ylim=(0, 1.02)
    )
    axes.patch.set_alpha(0)
    for group in range(num_groups):
        own = groups == group
        if not own.any():
            continue
        curve = kaplan_meier(times[own], events[own])
        colour = rank_color(group)
        label = f"{_called(group, num_groups)}: {own.sum()} patients, {events[own].sum()} events"
        axes.step([0, *curve.times], [1, *curve.values], where="post", color=colour, label=label)
        ended = times[own & ~events]
        axes.plot(ended, curve.at(ended), "|", color=colour, markersize=5)
    figure.legend(loc="outside upper center", fontsize=8)
    return side_by_side.figure_uri(figure)


def _called(group: int, num_groups: int) -> str:
    if group == 0:
        return "lowest risk"
    return "highest risk" if group == num_groups - 1 else f"risk group {group + 1}"


def slices(images: Sequence[Tensor]) -> str:
    """Draw the maximum intensity projection of each volume (1, D, H, W), 0 to 1, along its last axis, side by
    side."""
    brightest = [image[0].amax(dim=-1).T.numpy() for image in images]
    return side_by_side.figure_uri(row(brightest, Colours("intensity, scaled", 0, 1)))
