"""Computes all descriptors of a field, on one grid or on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from nbgpu.recipes.microstructure.correlations import CORRELATIONS, ORIENTATIONS
from nbgpu.recipes.microstructure.gram import GRAM_MATRICES
from nbgpu.recipes.microstructure.lineal_path import LINEAL_PATHS
from nbgpu.recipes.microstructure.measure import Descriptor, Measure, num_levels, slice_stacks

DESCRIPTORS: Mapping[str, Descriptor] = {
    descriptor.name: descriptor
    for descriptor in (*CORRELATIONS, *LINEAL_PATHS, *GRAM_MATRICES, *ORIENTATIONS)
}

_NUM_SLICES_AT_ONCE = 8


def described(slices: Tensor, descriptor: Descriptor, measure: Measure, levels: int) -> Tensor:
    """Compute one descriptor of slices (N, P, H, W) on several grid levels, differentiably if the descriptor
    is differentiable.

    Returns:
        (N, P', levels, *shape). P' is P, or 1 for a descriptor of all phases together. Level n is computed
        from the slices averaged over squares of 2^n pixels; rows and columns that are left over at the far
        edges are dropped.
    """
    by_level = []
    for level in range(levels):
        x = avg_pool2d(slices, 2**level) if level else slices
        if descriptor.of == "phase":
            values = descriptor.compute(x.flatten(0, 1), measure).unflatten(0, x.shape[:2])
        else:
            values = descriptor.compute(x, measure)[:, None]
        by_level.append(values)
    return torch.stack(by_level, dim=2)


@torch.no_grad()
def characterize(
    field: Tensor,
    names: Sequence[str],
    measure: Measure,
    *,
    multigrid: bool = True,
    isotropic: bool = False,
) -> dict[str, Tensor]:
    """Compute the descriptors of a field, by name.

    Args:
        field: (P, H, W) or (P, D, H, W), float64.
        names: keys of `DESCRIPTORS`.
        measure: the parameters of the descriptors.
        multigrid: whether to describe also the field averaged over 2, 4, ... pixels, on as many levels as
            `num_levels` gives.
        isotropic: whether to average over the three directions of a volume instead of keeping one result per
            direction.

    Returns:
        (P', levels, *shape) for a picture, and for a volume if `isotropic`; else (3, P', levels, *shape),
        where each entry is the mean over the slices perpendicular to one direction. P' is P, or 1 for
        descriptors of all phases.
    """
    levels = num_levels(tuple(field.shape[1:]), measure.limit_to) if multigrid else 1
    result = {}
    for name in names:
        descriptor = DESCRIPTORS[name]
        if field.ndim == 3:
            result[name] = described(field[None], descriptor, measure, levels)[0]
            continue
        directions = []
        for slices in slice_stacks(field):
            parts = [
                described(part, descriptor, measure, levels).sum(dim=0)
                for part in slices.split(_NUM_SLICES_AT_ONCE)
            ]
            directions.append(torch.stack(parts).sum(dim=0) / len(slices))
        stacked = torch.stack(directions)
        result[name] = stacked.mean(dim=0) if isotropic else stacked
    return result
