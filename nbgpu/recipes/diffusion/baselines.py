"""What an image is worth that no network made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement

import torch
from torch import Tensor


def mean_image(targets: Tensor) -> Tensor:
    """(N, 1, D, H, W) -> (1, 1, D, H, W)."""
    return targets.mean(dim=0, keepdim=True)


class VoxelwiseQuadratic:
    """The quadratic polynomial of a voxel's other modalities that is nearest to its target, by least squares.

    Args:
        pairs: conditions (N, C, D, H, W) and targets (N, 1, D, H, W), some at a time.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        products: Tensor | float = 0.0
        right: Tensor | float = 0.0
        for condition, target in pairs:
            terms = _terms(condition)
            products = products + terms.T @ terms
            right = right + terms.T @ target.flatten().double()
        assert isinstance(products, Tensor)
        assert isinstance(right, Tensor)
        # lstsq, because modalities that are alike make the products singular.
        self.weights: Tensor = torch.linalg.lstsq(products, right[:, None], driver="gelsd").solution[:, 0]

    def __call__(self, condition: Tensor) -> Tensor:
        """(N, C, D, H, W) -> (N, 1, D, H, W), cut to -1..1."""
        shape = (len(condition), 1, *condition.shape[2:])
        found: Tensor = (_terms(condition) @ self.weights).view(shape).clamp(-1, 1)
        return found.to(condition.dtype)


def _terms(condition: Tensor) -> Tensor:
    """1, each modality and each product of two, for every voxel: (N * D * H * W, K) in float64."""
    channels = [channel.flatten() for channel in condition.double().unbind(dim=1)]
    products = [a * b for a, b in combinations_with_replacement(channels, 2)]
    return torch.stack([torch.ones_like(channels[0]), *channels, *products], dim=1)
