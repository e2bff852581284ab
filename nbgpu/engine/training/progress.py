"""Tracks the validations: which one was the best, whether they still improve, and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.errors import RunError
from nbgpu.run_folder.checkpoint_files import Score


class BestMetricTracker:
    """Follows one value of the validations, `best_metric`. All ranks see the same values, and so make the
    same decisions.

    `best` is the best of all values. Early stopping counts the validations since a value last beat the one
    before by more than `early_stop_min_delta`, so that ever smaller gains do not prolong a run.

    Args:
        config: the settings; if `best_metric` is empty, nothing is followed.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._sign = 1.0 if config.best_mode == "max" else -1.0
        self.best: Score | None = None
        self._to_beat: float | None = None
        """The last value that was better by more than `early_stop_min_delta`."""
        self._num_worse = 0
        """The number of validations since then."""

    def validated(self, step: int, means: Mapping[str, float]) -> None:
        """Record a validation.

        Args:
            step: optimizer steps done.
            means: the values of the validation by name, the same on every rank. NaN and infinite values are
                never better.

        Raises:
            RunError: there is no value with the name `best_metric`.
        """
        name = self._config.best_metric
        if not name:
            return
        if name not in means:
            names = ", ".join(means) or "none, because no sample is held out"
            raise RunError(
                f"best_metric={name!r} is not a value of this recipe's validation. Values: {names}"
            )
        value = means[name]
        if self._is_better(value, self.best.value if self.best else None, by=0.0):
            self.best = Score(step, name, value)
        if self._is_better(value, self._to_beat, by=self._config.early_stop_min_delta):
            self._to_beat, self._num_worse = value, 0
        else:
            self._num_worse += 1

    def is_best(self, step: int) -> bool:
        """Return whether this step has the best validation."""
        return self.best is not None and self.best.step == step

    @property
    def is_over(self) -> bool:
        """Return whether it is time to stop."""
        return 0 < self._config.early_stop_patience <= self._num_worse

    def end_in_words(self, step: int) -> str:
        """Return why a run ended early at this step."""
        name, count = self._config.best_metric, f"{self._num_worse} validation{'s' * (self._num_worse > 1)}"
        if self.best is None:
            return f"early stopping at step {step}: {name} was NaN or infinite in all {count}"
        more_than = f" by more than {delta:g}" if (delta := self._config.early_stop_min_delta) else ""
        return (
            f"early stopping at step {step}: {name} was not better{more_than} in the last {count}. The best is "
            f"{self.best.value:.4g}, of step {self.best.step}: run.checkpoint('best')"
        )

    def weights_in_words(self, step: int) -> str:
        """Describe the weights of this step, from which a result is computed: the number of the step, and
        whether it has the best validation."""
        weights = f"{'averaged, ' if self._config.ema_decay else ''}of step {step}"
        if self.best is None:
            return weights
        score = f"{self.best.metric} {self.best.value:.4g}"
        if self.best.step == step:
            return f"{weights}, which has the best validation ({score})"
        return f"{weights}; the best validation ({score}) is that of step {self.best.step}: run.checkpoint('best')"

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the state that future decisions depend on."""
        return {
            "metric": self._config.best_metric,
            "mode": self._config.best_mode,
            "best": None if self.best is None else [self.best.step, self.best.value],
            "to_beat": self._to_beat,
            "num_worse": self._num_worse,
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the result of `state`; start over if it followed another metric or mode, or is
        None."""
        config = self._config
        self.best, self._to_beat, self._num_worse = None, None, 0
        if state is None or (state["metric"], state["mode"]) != (config.best_metric, config.best_mode):
            return
        if state["best"] is not None:
            step, value = state["best"]
            self.best = Score(step, config.best_metric, value)
        self._to_beat = state["to_beat"]
        self._num_worse = state["num_worse"]

    def _is_better(self, value: float, before: float | None, by: float) -> bool:
        return math.isfinite(value) and (before is None or self._sign * (value - before) > by)
