"""The part of the control panel that chooses the devices of a new cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets as w

from nbgpu.config import ClusterConfig
from nbgpu.machine.devices import DEFAULT_CPU_RANKS
from nbgpu.ui.controls.device_picker import DevicePicker
from nbgpu.ui.controls.fields import Field


class DeviceControls:
    """The controls of the devices: the GPUs to use, or the number of CPU ranks."""

    def __init__(self) -> None:
        self.ranks = Field(ClusterConfig, "ranks")
        self._ranks_shown = ""
        self.gpus = DevicePicker()
        self.gpus.observe(lambda _: self._show_ranks(), ["value", "devices"])
        self._show_ranks()
        self.memory_limit = Field(ClusterConfig, "memory_limit")
        self.release_after_s = Field(ClusterConfig, "release_after_s")
        self.link = Field(ClusterConfig, "link")
        self.slow_rank = Field(ClusterConfig, "slow_rank")
        self.note = w.HTML()
        self.box = w.VBox([self.gpus, self.note])

    def _show_ranks(self) -> None:
        """Show the number of ranks that the choice gives, unless a person has typed another one."""
        devices = self.gpus.read
        if devices is not None and len(devices.cards) == 1:
            self.ranks.label = "CPU ranks"
        if self.ranks.value == self._ranks_shown or not self._ranks_shown:
            self.ranks.show(len(self.gpus.value) or DEFAULT_CPU_RANKS)
            self._ranks_shown = self.ranks.value

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
        # Before the driver has answered nothing is known of GPUs, and the cluster takes what there is.
        gpus = "auto" if self.gpus.read is None else ",".join(self.gpus.value) or "none"
        return {"gpus": gpus, **typed}
