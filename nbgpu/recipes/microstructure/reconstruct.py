"""Finds a field with given descriptors, in one process. A run on the ranks does the same through
nbgpu/engine/training/minimiser.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbgpu.engine.workload.descent import LBFGS, descend
from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.grids import (
    cut,
    decided,
    indicated,
    noise,
    num_grids,
    refined,
    shape_on,
    steps_on,
)
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective

_MAX_SHARE_ERROR = 0.01
_MAX_RELATIVE_SHARE_ERROR = 0.05
_NUM_CUTS = 4
"""The most cuts that are tried on each side of the target's share."""


@dataclass(frozen=True)
class Reconstruction:
    """The result of a reconstruction."""

    field: Tensor
    """The shares of the phases, (P, *shape)."""
    losses: list[list[float]]
    """The loss after each step, for each grid, coarsest first."""
    ended: list[str]
    """Why the search ended, on each grid."""

    @property
    def phases(self) -> Tensor:
        """Return the phase of each pixel, int64."""
        return decided(self.field)


def reconstruct(
    loss: Loss,
    shape: Sequence[int],
    *,
    num_phases: int = 1,
    levels: int = 1,
    num_steps: int = 200,
    optimizer: str = LBFGS,
    lr: float = 0.01,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> Reconstruction:
    """Search for a picture or a volume that looks like the loss's target.

    Args:
        loss: the distance from the target.
        shape: two or three lengths in pixels.
        num_phases: P of the field: 1 for two phases, where the share of the second is sought.
        levels: the number of levels of the target's descriptors that the search may use; 1 for the finest
            grid alone.
        num_steps: the number of steps on all grids together.
        optimizer, lr, tolerance: as for `descend`.
        seed: the seed of the initial noise.
    """
    grids = num_grids(shape, loss.measure.limit_to, levels)
    objective = Objective(loss)
    field = noise(num_phases, shape_on(grids - 1, shape), seed)
    losses, ended = [], []
    for grid, steps in zip(reversed(range(grids)), steps_on(grids, num_steps), strict=True):
        field = refined(field, shape_on(grid, shape)) if grid < grids - 1 else field
        on_grid: list[float] = []

        def after_step(found: Tensor, value: float, on_grid: list[float] = on_grid) -> None:
            nonlocal field
            field = found
            on_grid.append(value)

        ended.append(
            descend(
                lambda x, grid=grid: objective(x, coarser=grid),  # type: ignore[misc]
                field,
                steps,
                after_step,
                optimizer=optimizer,
                lr=lambda: lr,
                tolerance=tolerance,
            )
        )
        losses.append(on_grid)
    return Reconstruction(field, losses, ended)


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
