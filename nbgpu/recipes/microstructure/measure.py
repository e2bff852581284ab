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

_THRESHOLD = 0.75
_STEEPNESS = 10.0


NUM_DIRECTIONS = 3


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

    `compute` takes float64 input of the kind that `of` names, and returns (N, *shape), where the shape
    depends on the Measure alone:
    - 'phase': (N, H, W), the share of one phase in each pixel.
    - 'phases': (N, P, H, W), the shares of all phases, P >= 2.
    - 'orientations': (N, 3, H, W), rotation vectors in radians.

    `weight` is the default weight of its differences. A descriptor that is not differentiable can be measured
    but not reconstructed.
    """

    name: str
    compute: Callable[[Tensor, Measure], Tensor]
    weight: float = 1.0
    differentiable: bool = True
    of: Literal["phase", "phases", "orientations"] = "phase"


_AT_0 = float(np.float32(5.5277866e-4))
_AT_1 = float(np.float32(0.9241418))
"""The sigmoid at 0 and at 1, in float32 and rounded as by the reference's library: the rounding decides the
9th digit."""


def soft_step(share: Tensor) -> Tensor:
    """Return 0 at 0, 1 at 1, and a steep rise between: a threshold of 0.75 with a gradient.

    Seibert et al., "Reconstructing random heterogeneous media through differentiable optimization"
    (Computational Materials Science 2021, 10.1016/j.commatsci.2021.110455). The share of the pixels of a
    pattern that are in a phase becomes, approximately, whether all of them are.
    """
    sigmoid = torch.sigmoid((share - _THRESHOLD) * _STEEPNESS)
    return (sigmoid - _AT_0) / (_AT_1 - _AT_0)


def num_levels(shape: tuple[int, ...], limit_to: int) -> int:
    """Return the number of levels, the full field included, on which a repeatedly halved field is still
    larger than `limit_to` in each direction; at least 1."""
    return max(1, math.floor(math.log2(min(shape) / limit_to)))


def slices_along(field: Tensor, direction: int) -> Tensor:
    """Return the slices (N, P, H, W) of (P, D, H, W) perpendicular to one of its three directions, as a
    view."""
    return field.movedim(direction + 1, 0)


def stacks_of(field: Tensor) -> list[Tensor]:
    """Return the slices (N, P, H, W) of each direction as views: the three of (P, D, H, W), and the one
    slice of (P, H, W)."""
    return [field[None]] if field.ndim == 3 else [slices_along(field, d) for d in range(NUM_DIRECTIONS)]
