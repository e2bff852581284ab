"""The part of the control panel that chooses the devices of a new cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets as w

from nbgpu.config import ClusterConfig
from nbgpu.machine.devices import DEFAULT_CPU_RANKS, inventory
from nbgpu.ui.controls.fields import Field


class DeviceControls:
    """The controls of the devices: the GPUs to use, or the number of CPU ranks."""

    def __init__(self) -> None:
        self._gpus = inventory()
        self.ranks = Field(ClusterConfig, "ranks")
        self.ranks.show(len(self._gpus) or DEFAULT_CPU_RANKS)
        self.gpus = w.SelectMultiple(
            options=[(gpu.label(), gpu.uuid) for gpu in self._gpus],
            value=[gpu.uuid for gpu in self._gpus],
            rows=max(2, min(len(self._gpus), 8)),
            description="GPUs",
            tooltip="GPUs to use, one rank on each; none chosen: CPU ranks",
            style={"description_width": "136px"},
            layout={"width": "300px"},
        )
        self.gpus.observe(self._follow_choice, "value")
        self.memory_limit = Field(ClusterConfig, "memory_limit")
        self.release_after_s = Field(ClusterConfig, "release_after_s")
        self.link = Field(ClusterConfig, "link")
        self.slow_rank = Field(ClusterConfig, "slow_rank")
        self.note = w.HTML()
        self.box = w.VBox([self.gpus, self.note])
        if not self._gpus:
            self.gpus.layout.display = "none"
            self.ranks.label = "CPU ranks"

    def _follow_choice(self, change: Any) -> None:
        self.ranks.show(len(change["new"]) or DEFAULT_CPU_RANKS)

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the settings that the user types, by name."""
        return {
            "ranks": self.ranks,
            "memory_limit": self.memory_limit,
            "release_after_s": self.release_after_s,
            "link": self.link,
            "slow_rank": self.slow_rank,
        }

    def inputs(self) -> list[w.Widget]:
        """All controls of the devices."""
        return [self.gpus, *self.fields.values()]

    def values(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a cluster, including the values of its fields."""
        return {"gpus": ",".join(self.gpus.value) or "none", **typed}
