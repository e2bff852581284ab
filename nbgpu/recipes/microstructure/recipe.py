"""The microstructure recipe: characterizes a microstructure and searches for a field with the same
descriptors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbgpu.engine.workload.descent import Evaluate, bounded
from nbgpu.engine.workload.lbfgs import AfterStep, held_bytes
from nbgpu.engine.workload.problem import Problem
from nbgpu.engine.workload.shards import Shards, share_of
from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS, characterize
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.cutting import cut_near_share, s2_error
from nbgpu.recipes.microstructure.files import load_fields, write_vtk
from nbgpu.recipes.microstructure.grids import (
    decided,
    grid_shape,
    indicated,
    noise,
    num_grids,
    refined,
    steps_per_grid,
)
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import NUM_DIRECTIONS, S2
from nbgpu.recipes.microstructure.objective import MAX_PIXELS_AT_ONCE, Objective
from nbgpu.recipes.microstructure.pictures import block, correlations, slices
from nbgpu.recipes.microstructure.sample import micrograph
from nbgpu.recipes.microstructure.structure import structure_errors, structures
from nbgpu.recipes.microstructure.swaps import OPTIMIZERS as SWAPPING
from nbgpu.recipes.microstructure.swaps import at_random, swap
from nbgpu.recipes.microstructure.target import Target, load_target, save_descriptors
from nbgpu.recipes.side_by_side import Colours

_COPIES_IN_GRAPH = 4
"""The number of copies of a descriptor's values for each pixel that the forward and backward passes hold:
measured, not exact."""
_COPIES_OF_GRADIENT = 3
"""With several ranks, the number of copies of the gradients of a rank's slices across one direction: as
computed, as sent, and as received. A single rank has one copy."""


class Microstructure(Problem):
    """Searches for a picture or a volume whose slices have the descriptors of the data. The stages are the
    grids, coarsest first, and then the swaps of pixels if the settings have `swap_steps`."""

    def __init__(self, config: MicrostructureConfig) -> None:
        """Keep the settings; the data are read by `load`."""
        self.config = config
        self.optimizer = config.optimizer_type
        self.num_pairs = config.history_size
        self.tolerance = config.tolerance
        self._target: Target | None = None
        self._initial: Tensor | None = None
        self._num_grids = 1
        self._objectives: dict[tuple[int, int], Objective] = {}

    def load(self) -> None:
        """Read and measure the data; raise a DataError that lists every problem of the files."""
        config = self.config
        self._target = load_target(config)
        if config.multigrid_reconstruction:
            self._num_grids = num_grids(self._target.shape, config.limit_to, self._target.levels)
        if config.initial:
            (self._initial,), _ = load_fields(
                config.initial, [], self._target.measure, config.multiphase, config.threshold
            )
            num_phases, *shape = self._initial.shape
            wanted = (self._target.num_phases, *self._target.shape)
            if (num_phases, *shape) != wanted:
                raise DataError(
                    f"{config.initial}: has {num_phases} phases and {tuple(shape)} {_pixels(shape)}; needed are "
                    f"{wanted[0]} and {wanted[1:]}"
                )

    @property
    def target(self) -> Target:
        """The descriptors to match, and the shape of the field to find."""
        assert self._target is not None, "the data are loaded before anything else"
        return self._target

    @property
    def summary(self) -> tuple[str, ...]:
        """Lines about the target, the search and the data."""
        target, config = self.target, self.config
        grids = f" on {self._num_grids} grids" if self._num_grids > 1 else ""
        after = f", then {config.swap_steps} steps of swaps" if config.swap_steps else ""
        lines = [
            f"target: {target.summary}, with limit_to {config.limit_to}",
            f"looks for {' x '.join(map(str, target.shape))} {_pixels(target.shape)}{grids} with {self.optimizer}{after}, in float64",
        ]
        if any("GramMatrices" in name for name in config.descriptor_types):
            random = "one layer of random filters, no trained network"
            lines.append(
                f"Gram matrices of {random if config.gram_network == 'random' else config.gram_network}"
            )
        return (*lines, *target.warnings)

    @property
    def num_steps(self) -> Sequence[int]:
        swaps = [self.config.swap_steps] if self.config.swap_steps else []
        return [*steps_per_grid(self._num_grids, self.config.steps), *swaps]

    def _coarser(self, stage: int) -> int:
        """Return how many times the resolution of the field is halved in a stage."""
        return max(0, self._num_grids - 1 - stage)

    def _swaps(self, stage: int) -> bool:
        """Return whether a stage swaps pixels instead of following the gradient."""
        return stage >= self._num_grids or self.optimizer in SWAPPING

    def stage_name(self, stage: int) -> str:
        """Return the name of a stage: a grid, or the swaps after the grids."""
        return "swapping pixels" if stage >= self._num_grids else f"grid {stage + 1} of {self._num_grids}"

    def begin(self, stage: int, found: Tensor | None) -> Tensor:
        """Return the initial field of a stage: noise from the seed, `initial`, or the result of the stage
        before.

        If the stage swaps pixels, each pixel is in one phase; without `initial` or an earlier result, the
        phases are placed at random with the target's shares.
        """
        target = self.target
        shape = grid_shape(self._coarser(stage), target.shape)
        given = self._initial if found is None else found
        if given is None:
            if self._swaps(stage):
                return indicated(self._random_phases(), target.num_phases)
            return noise(target.num_phases, shape, self.config.seed)
        field = given if tuple(given.shape[1:]) == shape else refined(given, shape)
        if not self._swaps(stage):
            return field
        return indicated(decided(field) if found is None else self._phases(field), target.num_phases)

    def evaluate(
        self, tensor: Tensor, stage: int, step: int, rank: int, world_size: int
    ) -> tuple[Tensor, Tensor]:
        return self._objective(rank, world_size)(tensor, self._coarser(stage), step)

    def evaluate_part(self, tensor: Tensor, stage: int, step: int, shards: Shards) -> tuple[float, Tensor]:
        return self._objective(shards.rank, shards.world_size).part(tensor, shards, self._coarser(stage))

    def _objective(self, rank: int, world_size: int) -> Objective:
        """Return the objective for a rank. Objectives are kept by (rank, world size), because the number of
        ranks may change during a run."""
        config = self.config
        key = (rank, world_size)
        if key not in self._objectives:
            self._objectives[key] = Objective(
                self._loss(), rank, world_size, config.slices_per_step, config.seed
            )
        return self._objectives[key]

    def is_spread(self, stage: int) -> bool:
        return super().is_spread(stage) and not self._swaps(stage)

    def search(
        self,
        tensor: Tensor,
        stage: int,
        steps: range,
        evaluate: Evaluate,
        after_step: AfterStep,
        lr: Callable[[], float],
        rank: int,
        world_size: int,
    ) -> str:
        """Swap pixels if the stage does so, else follow the gradient; return why the search ended."""
        if not self._swaps(stage):
            return super().search(tensor, stage, steps, evaluate, after_step, lr, rank, world_size)
        is_annealing = stage < self._num_grids and self.optimizer == "simulatedannealing"
        return swap(
            self._loss(),
            tensor,
            steps,
            after_step,
            temperature=self.config.temperature if is_annealing else 0.0,
            seed=self.config.seed,
            rank=rank,
            world_size=world_size,
        )

    def _loss(self) -> Loss:
        """Return the loss of slices: the distance of their descriptors from the target's, with the weights
        and penalties of the settings."""
        config = self.config
        weights = {n: DESCRIPTORS[n].weight if w is None else w for n, w in config.weights.items()}
        return Loss(
            self.target.descriptors,
            weights,
            self.target.measure,
            config.loss_type,
            config.oor_multiplier,
            config.phase_sum_multiplier,
        )

    def measure(self, tensor: Tensor) -> dict[str, float]:
        """Assign each pixel to one phase and return the errors of that field: `s2_error` and
        `volume_fraction_error`.

        Both are mean absolute differences from the target: of the two-point correlations over all lags below
        limit_to, and of the shares of the phases. A field on a coarse grid is interpolated to the full one
        first.
        """
        field = tensor.cpu()
        if tuple(field.shape[1:]) != self.target.shape:
            field = refined(field, self.target.shape)
        return self._errors(self._phases(field))

    def _phases(self, field: Tensor) -> Tensor:
        """Return the phase of each pixel of a field (P, *shape), cut so that the phases have nearly the
        target's volume fractions."""
        phases = decided(field)
        # After swaps each pixel is in one phase already, and the volume fractions are right.
        if torch.equal(indicated(phases, len(field)), field):
            return phases
        target = self.target
        return cut_near_share(
            field, target.shares, lambda phases: s2_error(phases, target.descriptors, target.measure)
        )

    def _errors(self, phases: Tensor) -> dict[str, float]:
        """Return the errors of the two-point correlation and of the volume fractions of phases (*shape)."""
        target = self.target
        shares = indicated(phases, len(target.shares)).flatten(1).mean(dim=1)
        return {
            "s2_error": s2_error(phases, target.descriptors, target.measure),
            "volume_fraction_error": float((shares - target.shares).abs().mean()),
        }

    def _all_errors(self, phases: Tensor) -> dict[str, float]:
        """Return a row of the result's table: the errors of phases (*shape) in the two-point correlation and
        the volume fractions, and in measures of structure that no search minimises, rounded."""
        target, config = self.target, self.config
        errors = self._errors(phases)
        if target.structure:
            measured = structures(phases, len(target.shares), config.limit_to, config.periodic)
            errors |= structure_errors(measured, target.structure)
        return {name: round(value, 5) for name, value in errors.items()}

    def pictures(self, tensor: Tensor) -> dict[str, str]:
        """Return pictures of the share of the last phase: a slice perpendicular to each direction, and for a
        volume also a block."""
        # Rounding to 32 shades makes the PNG several times smaller.
        share = (tensor[-1].cpu() * 31).round() / 31
        colours = Colours("share of the last phase", 0, 1, "viridis")
        captions = {"the share of the last phase": slices(share, colours)}
        if share.ndim == NUM_DIRECTIONS:
            captions["the volume as a block"] = block(share, colours)
        return captions

    def result(self, tensor: Tensor, folder: Path) -> dict[str, Any]:
        """Write the field and its phases as .npy and VTK, and the target's descriptors; return a table of the
        errors of the field beside those of random pixels, a note and pictures."""
        target, config = self.target, self.config
        field = refined(tensor, target.shape) if tuple(tensor.shape[1:]) != target.shape else tensor
        phases = self._phases(field)
        np.save(folder / "field.npy", field.numpy())
        np.save(folder / "microstructure.npy", phases.numpy().astype(np.uint8))
        write_vtk(folder / "microstructure.vtk", phases, field)
        save_descriptors(folder / "descriptors.npz", target)
        table = {
            "found": self._all_errors(phases),
            "pixels at random, same shares": self._all_errors(self._random_phases()),
        }
        if config.data == "generated":
            length, fractions = config.generated_correlation_length, config.generated_fractions
            other = micrograph(target.shape, length, fractions, config.seed + 1)
            table["another sample of the same process"] = self._all_errors(other)
        notes = [
            f"Of {' x '.join(map(str, target.shape))} {_pixels(target.shape)}, as in microstructure.npy and .vtk; field.npy has the shares, "
            "descriptors.npz the target's descriptors"
        ]
        if target.structure:
            has_lines = any("LinealPath" in name for name in config.descriptor_types)
            unseen = "cluster_error" if has_lines else "lineal_path_error, chord_error_px and cluster_error"
            notes.append(f"The search does not minimise {unseen}")
        note = ". ".join([*notes, *target.warnings])
        return {"table": table, "note": note, "images": self._pictures(phases)}

    def _random_phases(self) -> Tensor:
        """Return random phases (*shape) with the volume fractions of the target."""
        return at_random(self.target.shares, self.target.shape, self.config.seed)

    def _pictures(self, phases: Tensor) -> dict[str, str]:
        """Draw the phases of the target, those of the result, and the two-point correlations of both. Return
        {caption: PNG as a data URI}."""
        target = self.target
        colours = Colours("number of the phase", 0, max(1, target.num_phases - 1), "viridis")
        pictures = {}
        if target.phases is not None:
            pictures["target"] = slices(target.phases, colours)
        pictures["found, a slice across each direction" if phases.ndim == 3 else "found"] = slices(
            phases, colours
        )
        if phases.ndim == NUM_DIRECTIONS:
            pictures["found, as a block"] = block(phases, colours)
        field = indicated(phases, target.num_phases)
        found_s2 = characterize(field, [S2], target.measure, multigrid=False, isotropic=True)[S2][-1, 0]
        target_s2 = torch.stack([t[S2][-1, 0] for t in target.descriptors]).mean(dim=0)
        pictures["two-point correlation of the last phase: target, found"] = correlations(target_s2, found_s2)
        return pictures

    def memory_bytes(self, world_size: int) -> dict[str, int]:
        """Estimate the memory of the rank that needs most, in bytes: of the field, its gradients, the state
        of the optimizer, and the autograd graph of the slices that are evaluated together."""
        target, limit = self.target, self.config.limit_to
        shape = (target.num_phases, *target.shape)
        field = 8 * int(np.prod(shape))
        # Values that a descriptor computes for each pixel; 64 stands for the descriptors with few of them.
        values_per_pixel = {
            "Correlations": 2 * limit * limit,
            "CrossCorrelations": 2 * limit * limit,
            "TwoPointCorrelations": 2 * limit * limit,
            "LinealPathApproximation": 2 * limit * limit + 2 * limit + 1,
        }
        most_values = max(values_per_pixel.get(name, 64) for name in self.config.descriptor_types)
        num_pixels = max(MAX_PIXELS_AT_ONCE, target.num_phases * int(np.prod(target.shape[-2:])))
        activations = 8 * num_pixels * most_values * _COPIES_IN_GRAPH
        if self.is_spread(0):
            held = held_bytes(shape, self.num_pairs, world_size)
            # The first rank has the largest share of the slices across each direction.
            lengths = target.shape if len(target.shape) == NUM_DIRECTIONS else (1,)
            share = max(len(share_of(length, 0, world_size)) / length for length in lengths)
            copies = _COPIES_OF_GRADIENT if world_size > 1 else 1
            return {
                "parameters": held.whole_bytes,
                "gradients": copies * int(field * share),
                "optimizer": held.shared_bytes,
                "activations": activations + held.working_bytes,
            }
        # Copies of the field: two for each pair that is remembered, and the optimizer's working vectors.
        optimizer_copies = 2 * self.num_pairs + 8 if bounded(self.optimizer) else 4
        return {
            "parameters": field,
            "gradients": 4 * field,
            "optimizer": optimizer_copies * field,
            "activations": activations,
        }


def _pixels(shape: Sequence[int]) -> str:
    """Return the word for the elements of a field of this shape: voxels or pixels."""
    return "voxels" if len(shape) == NUM_DIRECTIONS else "pixels"
