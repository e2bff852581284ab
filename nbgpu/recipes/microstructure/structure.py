"""Measures of a field's structure by which a reconstruction is judged, and which none minimises: straight
lines inside a phase, chords through it, and connected clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.ndimage import label
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from nbgpu.recipes.microstructure.measure import slice_stacks

_MAX_LINE = 4
"""The longest line that is measured, in units of limit_to."""
_NEIGHBOURS = np.zeros((3, 3, 3), dtype=bool)
_NEIGHBOURS[1, 1, :] = _NEIGHBOURS[1, :, 1] = True
"""The structuring element of a cluster: pixels that share a side in the same slice are connected."""


@dataclass(frozen=True)
class Structure:
    """The structure of slices perpendicular to one direction, each a mean over the slices and over their rows
    and columns.

    Attributes:
        lineal_path: the probability that a line over 1, 2 ... K pixels along an axis lies in a phase as a
            whole (Lu and Torquato 1992): (P, K).
        cluster: the probability that two pixels 1 ... L - 1 pixels apart along an axis belong to the same
            cluster of a phase, the two-point cluster function (Torquato, Beasley and Chiew 1988):
            (P, L - 1).
    """

    lineal_path: Tensor
    cluster: Tensor

    @property
    def chords(self) -> Tensor:
        """The probability that a chord, a stretch between two borders of a phase, is at least 1, 2 ... K - 1
        pixels long: (P, K - 1).

        It is the slope of the lineal path, divided by its first value (Torquato and Lu 1993), and 1 for a
        phase that has no border.
        """
        slope = self.lineal_path[:, :-1] - self.lineal_path[:, 1:]
        first = slope[:, :1]
        return torch.where(first > 0, slope / first.clamp(min=1e-300), 1.0)


def structures(phases: Tensor, num_phases: int, limit_to: int, periodic: bool) -> list[Structure]:
    """Measure phases (H, W), or (D, H, W) once for each direction.

    Args:
        phases: the phase of each pixel.
        num_phases: the number of phases, P.
        limit_to: pairs of pixels are less than this many pixels apart, and lines up to four times as long.
        periodic: whether the field continues beyond an edge at the opposite one.
    """
    return [_structure(stack[:, 0], num_phases, limit_to, periodic) for stack in slice_stacks(phases[None])]


def structure_errors(measured: Sequence[Structure], targets: Sequence[Structure]) -> dict[str, float]:
    """Return the distances of structures from those of a target, one for each direction or one for all.

    `lineal_path_error` and `cluster_error` are mean absolute differences of probabilities, over lengths,
    phases and directions. `chord_error_px` is the mean distance by which chords would have to grow or shrink
    to have the target's distribution, in pixels: the area between the two distributions (Wasserstein's
    distance), up to the longest line that both have.
    """
    pairs = [(one, targets[index % len(targets)]) for index, one in enumerate(measured)]
    longest = min(one.lineal_path.shape[1] for pair in pairs for one in pair)
    lines = torch.stack(
        [one.lineal_path[:, :longest] - target.lineal_path[:, :longest] for one, target in pairs]
    )
    chords = torch.stack(
        [one.chords[:, : longest - 1] - target.chords[:, : longest - 1] for one, target in pairs]
    )
    clusters = torch.stack([one.cluster - target.cluster for one, target in pairs])
    return {
        "lineal_path_error": float(lines.abs().mean()),
        "chord_error_px": float(chords.abs().sum(dim=2).mean()),
        "cluster_error": float(clusters.abs().mean()),
    }


def mean_structure(parts: Sequence[Structure]) -> Structure:
    """Return the mean over several directions or pictures, for the lengths of lines that all of them have."""
    longest = min(part.lineal_path.shape[1] for part in parts)
    return Structure(
        torch.stack([part.lineal_path[:, :longest] for part in parts]).mean(dim=0),
        torch.stack([part.cluster for part in parts]).mean(dim=0),
    )


def _structure(slices: Tensor, num_phases: int, limit_to: int, periodic: bool) -> Structure:
    """Measure the lineal path and the two-point cluster function of each phase of slices (N, H, W)."""
    longest = min(_MAX_LINE * limit_to, *slices.shape[1:])
    lines, clusters = [], []
    for phase in range(num_phases):
        inside = slices == phase
        lines.append(_lineal_path(inside, longest, periodic))
        clusters.append(_cluster(inside.numpy(), limit_to, periodic))
    return Structure(torch.stack(lines), torch.stack(clusters))


def _lineal_path(inside: Tensor, longest: int, periodic: bool) -> Tensor:
    """Return the lineal path (K,) of a phase from its indicator in slices (N, H, W): the share of the
    starting pixels from which a line over 1 ... K pixels lies in the phase, as a mean over both axes."""
    means = []
    for axis in (1, 2):
        # Whether the line that starts at a pixel lies in the phase; each length adds one more pixel.
        is_whole = inside
        shares = [is_whole.double().mean()]
        for length in range(2, longest + 1):
            next_pixel = inside.roll(1 - length, axis)
            if not periodic:
                num_starts = inside.shape[axis] - length + 1
                is_whole, next_pixel = (part.narrow(axis, 0, num_starts) for part in (is_whole, next_pixel))
            is_whole = is_whole & next_pixel
            shares.append(is_whole.double().mean())
        means.append(torch.stack(shares))
    return torch.stack(means).mean(dim=0)


def _cluster(inside: np.ndarray, limit_to: int, periodic: bool) -> Tensor:
    """Return the two-point cluster function (L - 1,) of a phase from its indicator in slices (N, H, W): the
    share of the pairs of pixels at each distance that belong to one cluster, as a mean over both axes."""
    labels = _label_clusters(inside, periodic)
    means = []
    for distance in range(1, limit_to):
        shares = []
        for axis in (1, 2):
            first, other = labels, np.roll(labels, -distance, axis)
            if not periodic:
                kept = np.arange(labels.shape[axis] - distance)
                first, other = (np.take(part, kept, axis) for part in (first, other))
            shares.append(((first == other) & (first > 0)).mean())
        means.append(np.mean(shares))
    return torch.tensor(means, dtype=torch.float64)


def _label_clusters(inside: np.ndarray, periodic: bool) -> np.ndarray:
    """Return the number of the cluster of each pixel (N, H, W), from 1 inside the phase, and 0 outside."""
    labels, num_clusters = label(inside, structure=_NEIGHBOURS)
    if not periodic or not num_clusters:
        return np.asarray(labels)
    # Clusters that touch across a periodic edge are one: merge the labels that a graph of contacts connects.
    first = np.concatenate([labels[:, 0].ravel(), labels[:, :, 0].ravel()])
    other = np.concatenate([labels[:, -1].ravel(), labels[:, :, -1].ravel()])
    touching = (first > 0) & (other > 0)
    shape = (num_clusters + 1, num_clusters + 1)
    graph = coo_array((np.ones(int(touching.sum())), (first[touching], other[touching])), shape)
    _, merged = connected_components(graph, directed=False)
    return np.where(labels > 0, merged[labels] + 1, 0)
