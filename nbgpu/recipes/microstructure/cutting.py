"""Cuts a field into phases where its two-point correlations are nearest to the target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.grids import cut, indicated
from nbgpu.recipes.microstructure.measure import S2, Measure

_MAX_SHARE_ERROR = 0.01
_MAX_RELATIVE_SHARE_ERROR = 0.05
_NUM_CUTS = 4
"""The most cuts that are tried on each side of the target's share."""


def cut_near_share(field: Tensor, shares: Tensor, error: Callable[[Tensor], float]) -> Tensor:
    """Assign each pixel to a phase, with volume fractions near the target's at which the error is least;
    return the phases, int64.

    The two-point correlations of a target that is one finite picture may fit best at a slightly different
    volume fraction than the target's. For two phases, the fraction is therefore moved away from the target's
    in small steps as long as the error falls: by at most one hundredth of the pixels and a twentieth of the
    smaller phase. With a field for each phase, the fractions are exactly the target's.

    Args:
        field: the shares of the phases in each pixel, (P, ...).
        shares: the target's volume fractions, as for `cut`.
        error: the error of a field of phases, such as `s2_error`.
    """
    best = cut(field, shares)
    if len(field) > 1:
        return best
    tolerance = min(_MAX_SHARE_ERROR, _MAX_RELATIVE_SHARE_ERROR * float(shares.min()))
    step = tolerance / _NUM_CUTS * shares.new_tensor([-1, 1])
    least = error(best)
    for direction in (1, -1):
        for number in range(1, _NUM_CUTS + 1):
            phases = cut(field, shares + direction * number * step)
            if (value := error(phases)) >= least:
                break
            best, least = phases, value
    return best


def s2_error(
    phases: Tensor, target: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], measure: Measure
) -> float:
    """Return the mean absolute difference of the two-point correlations of phases from a target's, over all
    lags below limit_to, phases and directions.

    Args:
        phases: the phase of each pixel, (H, W) or (D, H, W).
        target: one set of descriptors, or one for each direction, with the 'FFTCorrelations' of one phase or
            of all.
        measure: the parameters with which the target was measured.
    """
    targets = [target] if isinstance(target, Mapping) else target
    target_s2 = torch.stack([t[S2][:, 0] for t in targets])
    s2 = characterize(indicated(phases, target_s2.shape[1]), [S2], measure, multigrid=False)[S2]
    s2 = s2[:, :, 0] if phases.ndim == 3 else s2[None, :, 0]
    return float((s2 - target_s2).abs().mean())
