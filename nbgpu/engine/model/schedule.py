"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.engine.workload.recipe import Optimizing, Recipe

_NUM_TRIED = 1000
"""About how many steps of a recipe's own schedule are tried before the run begins."""


class LearningRate:
    """Linear warm-up, then the schedule of the settings; or the recipe's own schedule.

    The rate follows from the number of the step, so that a repeated step, here or on a replaced rank, has the
    same rate. Only 'plateau' has a state: the validation losses so far.

    Args:
        config: the settings.
        world_size: the number of ranks, for `lr_scaling`.
        total_steps: the step at which 'cosine' ends.
        steps_per_epoch: the optimizer steps of one pass over the data, for `warmup_epochs`.
        recipe: the recipe, which may have a schedule of its own.
    """

    def __init__(
        self,
        config: TrainConfig,
        world_size: int,
        total_steps: int,
        steps_per_epoch: int,
        recipe: Recipe | None = None,
    ) -> None:
        self.peak = config.peak_lr(config.samples_per_step(world_size))
        self._config = config
        self._total_steps = total_steps
        self.num_warmup_steps = config.num_warmup_steps(total_steps, steps_per_epoch)
        self._num_decays = 0
        self._best = math.inf
        self._num_worse = 0
        self._own = recipe if isinstance(recipe, Optimizing) else None

    def at(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if self._own is not None and (factor := self._own.schedule(step, self._total_steps)) is not None:
            return self.peak * factor
        after_warmup = step - self.num_warmup_steps
        if after_warmup < 0:
            # Step 0 has a rate above zero: with the rate 0 it would change nothing.
            return self.peak * (step + 1) / self.num_warmup_steps
        floor = min(self._config.min_lr, self.peak)
        match self._config.schedule:
            case "constant":
                return self.peak
            case "cosine":
                done = after_warmup / max(1, self._total_steps - self.num_warmup_steps)
                return floor + (self.peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
            case "step":
                num_decays = after_warmup // self._config.lr_decay_every
            case "plateau":
                num_decays = self._num_decays
        return max(floor, self.peak * self._config.lr_decay**num_decays)

    def try_out(self) -> None:
        """Call the recipe's own schedule for the first and the last step and for a thousand steps between, or
        for all if there are fewer, so that its errors come before the run and not in its middle."""
        if self._own is not None:
            every = max(1, math.ceil(self._total_steps / _NUM_TRIED))
            for step in (*range(0, self._total_steps, every), self._total_steps - 1):
                self._own.schedule(step, self._total_steps)

    def validated(self, loss: float) -> bool:
        """Record a validation loss, the same on every rank; return whether the rate falls because of it."""
        if self._config.schedule != "plateau":
            return False
        if loss < self._best:
            self._best, self._num_worse = loss, 0
            return False
        self._num_worse += 1
        if self._num_worse <= self._config.plateau_patience:
            return False
        self._num_decays += 1
        self._num_worse = 0
        return True

    def state(self) -> dict[str, Any]:
        """Return as JSON the state of 'plateau', on which `at` depends in addition to the step."""
        best = None if math.isinf(self._best) else self._best
        return {"num_decays": self._num_decays, "best": best, "num_worse": self._num_worse}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`."""
        self._num_decays = state["num_decays"]
        self._best = math.inf if state["best"] is None else state["best"]
        self._num_worse = state["num_worse"]
