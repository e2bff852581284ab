"""A baseline without a network."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement

import torch
from torch import Tensor

_NUM_AT_ONCE = 2**20
"""The most voxels whose polynomial terms are in memory at once."""


class VoxelwiseQuadratic:
    """A regression without a network: the target's voxel is a quadratic polynomial in the same voxel of the
    other modalities, fitted by least squares.

    Args:
        pairs: batches of conditions (N, C, D, H, W) and targets (N, 1, D, H, W).
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Fit the polynomial's weights (terms,) in float64 to all pairs."""
        # The normal equations A^T A w = A^T b are summed over parts, because A does not fit in memory.
        grams, moments = [], []
        for condition, target in pairs:
            target_parts = torch.split(target.flatten().double(), _NUM_AT_ONCE)
            for voxels, values in zip(_voxels(condition), target_parts, strict=True):
                design = _terms(voxels)
                grams.append(design.T @ design)
                moments.append(design.T @ values)
        gram, moment = torch.stack(grams).sum(dim=0), torch.stack(moments).sum(dim=0)
        # Similar modalities make A^T A singular, so that these equations are solved by least squares.
        self.weights: Tensor = torch.linalg.lstsq(gram, moment[:, None], driver="gelsd").solution[:, 0]

    def __call__(self, condition: Tensor) -> Tensor:
        """Return the polynomial's values, clipped to -1..1: (N, C, D, H, W) -> (N, 1, D, H, W)."""
        values = torch.cat([_terms(voxels) @ self.weights for voxels in _voxels(condition)])
        return values.view(len(condition), 1, *condition.shape[2:]).clamp(-1, 1).to(condition.dtype)


def _voxels(condition: Tensor) -> tuple[Tensor, ...]:
    """Return the voxels of conditions (N, C, D, H, W) in chunks (C, K) with K <= _NUM_AT_ONCE, because the
    terms of a whole volume of 256 x 256 x 256 voxels would take more than a gigabyte."""
    return torch.split(condition.transpose(0, 1).flatten(1), _NUM_AT_ONCE, dim=1)


def _terms(voxels: Tensor) -> Tensor:
    """Return the terms 1, each modality and each product of two modalities: (C, K) -> (K, terms) in
    float64."""
    channels = list(voxels.double())
    products = [a * b for a, b in combinations_with_replacement(channels, 2)]
    return torch.stack([torch.ones_like(channels[0]), *channels, *products], dim=1)
