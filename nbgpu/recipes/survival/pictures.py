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
    """Draw the Kaplan-Meier curve of each risk group, with a tick at each censored time.

    Args:
        times, events: the outcomes of the patients, (N,).
        groups: their risk groups (N,), from 0 for the lowest risk.
        num_groups: the number of risk groups.

    Returns:
        A PNG as a data URI.
    """
    figure = Figure(figsize=(6, 4), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot(
        xlabel="time, in the unit of the data", ylabel="share with no event", ylim=(0, 1.02)
    )
    axes.patch.set_alpha(0)
    for group in range(num_groups):
        members = groups == group
        if not members.any():
            continue
        curve = kaplan_meier(times[members], events[members])
        colour = rank_color(group)
        name = {0: "lowest risk", num_groups - 1: "highest risk"}.get(group, f"risk group {group + 1}")
        label = f"{name}: {members.sum()} patients, {events[members].sum()} events"
        axes.step([0, *curve.times], [1, *curve.values], where="post", color=colour, label=label)
        censored = times[members & ~events]
        axes.plot(censored, curve.at(censored), "|", color=colour, markersize=5)
    figure.legend(loc="outside upper center", fontsize=8)
    return side_by_side.figure_uri(figure)


def slices(images: Sequence[Tensor]) -> str:
    """Draw the maximum intensity projections of volumes (1, D, H, W), from 0 to 1, along their last axis,
    side by side. Return a PNG as a data URI."""
    brightest = [image[0].amax(dim=-1).T.numpy() for image in images]
    return side_by_side.figure_uri(row(brightest, Colours("intensity, scaled", 0, 1)))
