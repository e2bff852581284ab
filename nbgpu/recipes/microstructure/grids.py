"""The grids of a coarse-to-fine search: their number, the initial field, and the interpolation from one grid
to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from nbgpu.recipes.microstructure.measure import num_levels

_NOISE_STD = 0.1
"""The standard deviation of the initial values around 1 / P, in shares of a phase."""

_NEIGHBOUR_WEIGHT = 1e-6
"""The weight of the mean of a pixel's neighbours where a field is cut into phases: so small that it decides
only between pixels of equal share."""


def num_grids(shape: Sequence[int], limit_to: int, target_levels: int) -> int:
    """Return the number of grids of a coarse-to-fine search: at most as many as the target has descriptors
    for, and only so many that the coarsest grid is larger than `limit_to`."""
    return min(num_levels(tuple(shape), limit_to), target_levels)


def grid_shape(grid: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a field on a coarser grid, whose pixels are 2^grid times as wide."""
    return tuple(length // 2**grid for length in shape)


def steps_per_grid(num_grids: int, num_steps: int) -> list[int]:
    """Return the number of steps on each grid, coarsest first: equal shares, and the remainder goes to the
    last grid."""
    share, rest = divmod(num_steps, num_grids)
    return [*(share,) * (num_grids - 1), share + rest]


def noise(num_phases: int, shape: Sequence[int], seed: int) -> Tensor:
    """Return the initial field (P, *shape): normal noise around 1 / P (around 1/2 for P = 1), clamped to
    0..1, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    mean = 1 / max(2, num_phases)
    field = torch.randn(num_phases, *shape, generator=generator, dtype=torch.float64) * _NOISE_STD + mean
    return field.clamp_(0, 1)


def refined(field: Tensor, shape: Sequence[int]) -> Tensor:
    """Interpolate (P, ...) linearly between the pixel centres to a finer grid."""
    mode = "bilinear" if field.ndim == 3 else "trilinear"
    return interpolate(field[None], size=tuple(shape), mode=mode, align_corners=False)[0]


def decided(field: Tensor) -> Tensor:
    """Return the phase of each pixel, int64, without the phase axis: the phase with the largest share, or for
    P = 1 whether the share is above 1/2."""
    return field.argmax(dim=0) if len(field) > 1 else (field[0] > 0.5).long()


def pixel_counts(shares: Tensor, num_pixels: int) -> Tensor:
    """Return the number of pixels of each phase, (P,), for volume fractions (P,); the numbers add up to
    `num_pixels`."""
    positive = shares.clamp(min=0)
    # Rounding the cumulated shares keeps the sum exact; rounding each share would not.
    ends = (positive.cumsum(0) / positive.sum() * num_pixels).round().long()
    return ends.diff(prepend=ends.new_zeros(1))


def cut(field: Tensor, shares: Tensor) -> Tensor:
    """Assign each pixel to one phase so that the phases have the given volume fractions, exact to one pixel;
    return the phase of each pixel, int64.

    For P = 1 this is a threshold, which need not be 1/2. For several phases, each pixel first gets the phase
    with the largest share; then pixels move from phases with too many pixels to phases with too few, those
    first that lose least of their share. Where shares are equal, as they often are at 0 and at 1, the
    neighbours decide.

    Args:
        field: the shares of the phases in each pixel, (P, ...).
        shares: the volume fraction of each phase: (P,), or (2,) for P = 1.
    """
    num_wanted = pixel_counts(shares, field[0].numel())
    # A single field is the share of the second phase; the first one has the rest.
    if len(field) == 1:
        field = torch.cat([1 - field, field])
    # Neighbours are added one after the other: six copies of a large field would take too much memory.
    neighbours = torch.zeros_like(field)
    for dim in range(1, field.ndim):
        for step in (-1, 1):
            neighbours += field.roll(step, dim)
    scores = neighbours.mul_(_NEIGHBOUR_WEIGHT / (2 * (field.ndim - 1))).add_(field).flatten(1)
    shape = field.shape[1:]
    del field, neighbours
    phases = scores.argmax(dim=0)
    num_lacking = num_wanted - phases.bincount(minlength=len(num_wanted))
    for phase in (num_lacking < 0).nonzero().flatten().tolist():
        for other in (num_lacking > 0).nonzero().flatten().tolist():
            num_moved = int(min(-num_lacking[phase], num_lacking[other]))
            pixels = (phases == phase).nonzero().flatten()
            # First those pixels whose share of the new phase is nearest to that of the old one.
            order = (scores[phase, pixels] - scores[other, pixels]).argsort(stable=True)
            phases[pixels[order[:num_moved]]] = other
            num_lacking[phase] += num_moved
            num_lacking[other] -= num_moved
    return phases.view(shape)


def indicated(phases: Tensor, num_phases: int) -> Tensor:
    """Return the indicator functions (P, *shape) of phases 0 to P - 1 in float64: 1 where a pixel is in the
    phase, else 0. With `num_phases=1` the result is the indicator function of phase 1 alone."""
    if num_phases == 1:
        return (phases == 1).double()[None]
    return torch.stack([(phases == phase).double() for phase in range(num_phases)])
