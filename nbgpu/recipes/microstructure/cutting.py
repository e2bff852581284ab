"""Cuts a field into phases where its two-point correlations are nearest to the target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.grids import cut, indicated
from nbgpu.recipes.microstructure.measure import Measure

_MAX_SHARE_ERROR = 0.01
_MAX_RELATIVE_SHARE_ERROR = 0.05
_NUM_CUTS = 4
"""The most cuts that are tried on each side of the target's share."""


def cut_near_share(field: Tensor, shares: Tensor, error: Callable[[Tensor], float]) -> Tensor:
    """Return the phase of each pixel, int64, cut where the error is least near the target's shares.

    The correlations of one finite picture can ask for a little more or less of a phase than the picture has,
    and then both cannot be met. For two phases the cut leaves the target's share as long as the error falls,
    by at most one hundredth of the pixels and a twentieth of the smaller phase. With a field for each phase
    all shares are met.

    Args:
        field: the shares of the phases in each pixel, (P, ...).
        shares: the target's, as for `cut`.
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
            found = error(phases)
            if found >= least:
                break
            best, least = phases, found
    return best


def s2_error(
    phases: Tensor, target: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], measure: Measure
) -> float:
    """Return the mean absolute difference of the two-point correlations, over all lags below limit_to, phases
    and directions.

    Args:
        phases: the phase of each pixel.
        target: one set of descriptors, or one for each direction, with the 'FFTCorrelations' of one phase or
            of all.
    """
    targets = [target] if isinstance(target, Mapping) else target
    wanted = torch.stack([t["FFTCorrelations"][:, 0] for t in targets])
    field = indicated(phases, wanted.shape[1])
    found = characterize(field, ["FFTCorrelations"], measure, multigrid=False)["FFTCorrelations"]
    found = found[:, :, 0] if phases.ndim == 3 else found[None, :, 0]
    return float((found - wanted).abs().mean())
