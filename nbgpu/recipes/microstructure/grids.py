"""From coarse grids to fine ones: how many there are, where to begin on each, and how a field gets from one
to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

_SPREAD = 0.1
"""Of the first values around the middle between the phases."""


def num_grids(shape: Sequence[int], limit_to: int, levels_of_target: int) -> int:
    """On how many grids a field can be found one after another: the coarsest is still larger than `limit_to`,
    and the target has its descriptors."""
    of_field = math.floor(math.log2(min(shape) / limit_to))
    return max(1, min(of_field, levels_of_target))


def shape_on(grid: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape on the grid that is 2^grid times as coarse."""
    return tuple(length // 2**grid for length in shape)


def steps_on(num_grids: int, num_steps: int) -> list[int]:
    """How many of the steps belong to each grid, coarsest first: as many each, and the rest to the last
    one."""
    each = num_steps // num_grids
    return [*(each,) * (num_grids - 1), num_steps - each * (num_grids - 1)]


def noise(num_phases: int, shape: Sequence[int], seed: int) -> Tensor:
    """(P, *shape): where the search begins: normal numbers around 1 / P (around 1/2 for one), inside 0..1,
    the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    middle = 1 / max(2, num_phases)
    field = torch.randn(num_phases, *shape, generator=generator, dtype=torch.float64) * _SPREAD + middle
    return field.clamp_(0, 1)


def refined(field: Tensor, shape: Sequence[int]) -> Tensor:
    """(P, ...) on a finer grid, linearly between the pixels' middles."""
    mode = "bilinear" if field.ndim == 3 else "trilinear"
    return interpolate(field[None], size=tuple(shape), mode=mode, align_corners=False)[0]


def decided(field: Tensor) -> Tensor:
    """The phase of each pixel, int64, shape without the phases: the one with the largest share, or for one
    whether it is over 1/2."""
    return field.argmax(dim=0) if len(field) > 1 else (field[0] > 0.5).long()


def indicated(phases: Tensor, num_phases: int) -> Tensor:
    """(P, *shape) in float64 of phases 0 to n - 1: 1 where the pixel is in the phase; for `num_phases` 1 that
    of phase 1 alone."""
    if num_phases == 1:
        return (phases == 1).double()[None]
    return torch.stack([(phases == phase).double() for phase in range(num_phases)])
