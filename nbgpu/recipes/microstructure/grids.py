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


_TIE = 1e-6
"""The weight of the neighbours of a pixel where a field is cut into phases."""


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


def pixels_of(shares: Tensor, num_pixels: int) -> Tensor:
    """Return how many of the pixels each phase gets, (P,), for shares (P,): exact to one pixel."""
    positive = shares.clamp(min=0)
    ends = (positive.cumsum(0) / positive.sum() * num_pixels).round().long()
    return ends.diff(prepend=ends.new_zeros(1))


def cut(field: Tensor, shares: Tensor) -> Tensor:
    """Return the phase of each pixel, int64, so that each phase has its share of the pixels, exact to one.

    For one phase indicator that is a threshold, which need not be 1/2. For several, each pixel gets the phase
    with the largest share, and then those pixels change from a phase with too many to one with too few that
    lose least by it. Where shares are equal, as many are at 0 and at 1, the neighbours decide.

    Args:
        field: the shares of the phases in each pixel, (P, ...).
        shares: the share of the pixels that each phase gets: (P,), or (2,) for P = 1.
    """
    # A single field is the share of the second phase; the first one has the rest.
    wanted = pixels_of(shares, field[0].numel())
    if len(field) == 1:
        field = torch.cat([1 - field, field])
    # The mean of the neighbours, with a weight that decides only between equal shares. Neighbours are added
    # one after the other, because six copies of a large field would take too much memory.
    around = torch.zeros_like(field)
    for dim in range(1, field.ndim):
        for step in (-1, 1):
            around += field.roll(step, dim)
    worth = around.mul_(_TIE / (2 * (field.ndim - 1))).add_(field).flatten(1)
    shape = field.shape[1:]
    del field, around
    phases = worth.argmax(dim=0)
    lacking = wanted - phases.bincount(minlength=len(wanted))
    for phase in (lacking < 0).nonzero().flatten().tolist():
        for other in (lacking > 0).nonzero().flatten().tolist():
            num_moved = int(min(-lacking[phase], lacking[other]))
            places = (phases == phase).nonzero().flatten()
            # First those pixels whose share of the new phase is nearest to that of the old one.
            order = (worth[phase, places] - worth[other, places]).argsort(stable=True)
            phases[places[order[:num_moved]]] = other
            lacking[phase] += num_moved
            lacking[other] -= num_moved
    return phases.view(shape)


def indicated(phases: Tensor, num_phases: int) -> Tensor:
    """Return the indicator functions (P, *shape) of phases 0 to n - 1 in float64: 1 where the pixel is in the
    phase.

    With `num_phases=1` only that of phase 1.
    """
    if num_phases == 1:
        return (phases == 1).double()[None]
    return torch.stack([(phases == phase).double() for phase in range(num_phases)])
