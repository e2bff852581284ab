"""Whether validations still get better: which was the best, and when it is time to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.errors import RunError
from nbgpu.run_folder.checkpoint_files import Score


class Progress:
    """Follows one value of the validations, `best_metric`. Every rank sees the same values, and so decides
    the same.

    The best is the best of all; what `early_stop_patience` waits for is a value that is better by more than
    `early_stop_min_delta` than the last one that was, so that ever smaller gains do not keep a run alive.

    Args:
        config: the settings; where `best_metric` is empty, nothing is followed.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._sign = 1.0 if config.best_mode == "max" else -1.0
        self.best: Score | None = None
        self._to_beat: float | None = None
        self._num_worse = 0

    def validated(self, step: int, means: Mapping[str, float]) -> None:
        """Takes note of a validation.

        Args:
            step: optimizer steps done.
            means: its values by name, the same on every rank. NaN and infinite ones are never better.

        Raises:
            RunError: there is no such value.
        """
        name = self._config.best_metric
        if not name:
            return
        if name not in means:
            known = ", ".join(means) or "none, because no sample is held out"
            raise RunError(f"best_metric={name!r} is no value of this recipe's validation. Values: {known}")
        value = means[name]
        if self._is_better(value, self.best.value if self.best else None, by=0.0):
            self.best = Score(step, name, value)
        if self._is_better(value, self._to_beat, by=self._config.early_stop_min_delta):
            self._to_beat, self._num_worse = value, 0
        else:
            self._num_worse += 1

    def is_best(self, step: int) -> bool:
        """Whether the best validation is that of this step."""
        return self.best is not None and self.best.step == step

    @property
    def is_over(self) -> bool:
        """Whether it is time to stop."""
        return 0 < self._config.early_stop_patience <= self._num_worse

    def end_in_words(self, step: int) -> str:
        """Why a run ended early at this step."""
        name, count = self._config.best_metric, f"{self._num_worse} validation{'s' * (self._num_worse > 1)}"
        if self.best is None:
            return f"early stopping at step {step}: {name} was NaN or infinite in all {count}"
        more_than = f" by more than {delta:g}" if (delta := self._config.early_stop_min_delta) else ""
        return (
            f"early stopping at step {step}: {name} was not better{more_than} in the last {count}. The best is "
            f"{self.best.value:.4g}, of step {self.best.step}: run.checkpoint('best')"
        )

    def weights_in_words(self, step: int) -> str:
        """Which weights a result belongs to that is worked out with those of this step."""
        told = f"{'averaged, ' if self._config.ema_decay else ''}of step {step}"
        if self.best is None:
            return told
        score = f"{self.best.metric} {self.best.value:.4g}"
        if self.best.step == step:
            return f"{told}, which has the best validation ({score})"
        return (
            f"{told}; the best validation ({score}) is that of step {self.best.step}: run.checkpoint('best')"
        )

    def state(self) -> dict[str, Any]:
        """As JSON, what decisions to come depend on."""
        return {
            "metric": self._config.best_metric,
            "mode": self._config.best_mode,
            "best": None if self.best is None else [self.best.step, self.best.value],
            "to_beat": self._to_beat,
            "num_worse": self._num_worse,
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from what `state` gave; begins anew where that followed another value, or there was
        none."""
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
