"""The grids of a coarse-to-fine search: their number, the initial field, and the interpolation from one grid
to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

_SPREAD = 0.1
"""The standard deviation of the initial values around the middle between the phases."""


def num_grids(shape: Sequence[int], limit_to: int, levels_of_target: int) -> int:
    """Return the number of grids on which a field can be searched for one after another.

    The coarsest grid is still larger than `limit_to`, and the target has descriptors for it.
    """
    of_field = math.floor(math.log2(min(shape) / limit_to))
    return max(1, min(of_field, levels_of_target))


def shape_on(grid: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape on the grid that is 2^grid times as coarse."""
    return tuple(length // 2**grid for length in shape)


def steps_on(num_grids: int, num_steps: int) -> list[int]:
    """Return the number of steps on each grid, coarsest first: equal shares, and the remainder goes to the
    last grid."""
    each = num_steps // num_grids
    return [*(each,) * (num_grids - 1), num_steps - each * (num_grids - 1)]


def noise(num_phases: int, shape: Sequence[int], seed: int) -> Tensor:
    """Return the initial field (P, *shape): normal noise around 1 / P (around 1/2 for P = 1), clamped to
    0..1, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    middle = 1 / max(2, num_phases)
    field = torch.randn(num_phases, *shape, generator=generator, dtype=torch.float64) * _SPREAD + middle
    return field.clamp_(0, 1)


def refined(field: Tensor, shape: Sequence[int]) -> Tensor:
    """Interpolate (P, ...) linearly between the pixel centres to a finer grid."""
    mode = "bilinear" if field.ndim == 3 else "trilinear"
    return interpolate(field[None], size=tuple(shape), mode=mode, align_corners=False)[0]


def decided(field: Tensor) -> Tensor:
    """Return the phase of each pixel, int64, without the phase axis: the phase with the largest share, or for
    P = 1 whether the share is above 1/2."""
    return field.argmax(dim=0) if len(field) > 1 else (field[0] > 0.5).long()


def indicated(phases: Tensor, num_phases: int) -> Tensor:
    """Return the indicator functions (P, *shape) of phases 0 to n - 1 in float64: 1 where the pixel is in the
    phase.

    With `num_phases=1` only that of phase 1.
    """
    if num_phases == 1:
        return (phases == 1).double()[None]
    return torch.stack([(phases == phase).double() for phase in range(num_phases)])
