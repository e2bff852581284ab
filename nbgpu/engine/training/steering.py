"""What the person sets while a run goes on: kept until its time has come, which is the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.config.settings import steerable


class Steering:
    """The settings that were asked for, and how often some were changed since the run began."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        """Those that wait for their time."""
        self._num_changes = 0

    def take_due(self, config: TrainConfig, begins_epoch: bool) -> dict[str, Any]:
        """Those that are to count from the next step on; settings of the data wait for an epoch to begin."""
        due_at = steerable(type(config))
        now = {name: value for name, value in self.asked.items() if due_at[name] == "step" or begins_epoch}
        self.asked = {name: value for name, value in self.asked.items() if name not in now}
        # A rank that took over has read all that was ever asked for.
        return {name: value for name, value in now.items() if value != getattr(config, name)}

    @staticmethod
    def changes_data(settings: Mapping[str, Any], config: TrainConfig) -> bool:
        """Whether the data have to be loaded anew for some of these settings."""
        due_at = steerable(type(config))
        return any(due_at[name] == "epoch" for name in settings)

    def changed(self) -> None:
        """Some settings have just been changed, on all ranks."""
        self._num_changes += 1

    def position(self, config: TrainConfig) -> dict[str, Any]:
        """What this rank knows of the person's wishes, as JSON: for `catch_up`."""
        return {
            "num_changes": self._num_changes,
            "settings": {name: getattr(config, name) for name in steerable(type(config))},
            "asked": self.asked,
        }

    def catch_up(self, positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Goes on from the rank that knows most; returns the settings that this one has missed.

        A rank that has just come knows the run's first settings only.

        Args:
            positions: of all ranks, in their order.
        """
        newest = max(positions, key=lambda position: position["num_changes"])
        missed: dict[str, Any] = newest["settings"] if self._num_changes < newest["num_changes"] else {}
        self.asked, self._num_changes = newest["asked"], newest["num_changes"]
        return missed
