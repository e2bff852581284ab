"""Settings that are changed during a run: kept until they are due, which is at the same step on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.config.settings import steerable


class Steering:
    """The settings that were requested, and how many times settings have changed since the run began."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        """The settings that are not yet due."""
        self._num_changes = 0

    def take_due(self, config: TrainConfig, begins_epoch: bool) -> dict[str, Any]:
        """Return the settings to apply from the next step on; settings of the data wait for the start of an
        epoch."""
        due_at = steerable(type(config))
        now = {name: value for name, value in self.asked.items() if due_at[name] == "step" or begins_epoch}
        self.asked = {name: value for name, value in self.asked.items() if name not in now}
        # A rank that replaced another has read all settings that were ever requested.
        return {name: value for name, value in now.items() if value != getattr(config, name)}

    @staticmethod
    def changes_data(settings: Mapping[str, Any], config: TrainConfig) -> bool:
        """Return whether the data have to be reloaded for some of these settings."""
        due_at = steerable(type(config))
        return any(due_at[name] == "epoch" for name in settings)

    def changed(self) -> None:
        """Count a change of settings that was just made on all ranks."""
        self._num_changes += 1

    def position(self, config: TrainConfig) -> dict[str, Any]:
        """Return what this rank knows of the requested settings, as JSON: for `catch_up`."""
        return {
            "num_changes": self._num_changes,
            "settings": {name: getattr(config, name) for name in steerable(type(config))},
            "asked": self.asked,
        }

    def catch_up(self, positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Continue from the rank that knows the most changes; return the settings that this rank has missed.

        A rank that has just joined knows only the settings with which the run began.

        Args:
            positions: the positions of all ranks, in order of rank.
        """
        newest = max(positions, key=lambda position: position["num_changes"])
        missed: dict[str, Any] = newest["settings"] if self._num_changes < newest["num_changes"] else {}
        self.asked, self._num_changes = newest["asked"], newest["num_changes"]
        return missed
