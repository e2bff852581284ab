"""Finds a field with given descriptors in one process, as a run on the ranks does through
nbgpu/engine/training/minimiser.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nbgpu.engine.workload.descent import LBFGS, descend
from nbgpu.recipes.microstructure.grids import decided, grid_shape, noise, num_grids, refined, steps_per_grid
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.objective import Objective


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
    field = noise(num_phases, grid_shape(grids - 1, shape), seed)
    losses, ended = [], []
    for grid, steps in zip(reversed(range(grids)), steps_per_grid(grids, num_steps), strict=True):
        field = refined(field, grid_shape(grid, shape)) if grid < grids - 1 else field
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
