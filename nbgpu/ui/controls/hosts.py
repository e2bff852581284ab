"""The part of the control panel that chooses on which hosts a new cluster has its ranks."""

from __future__ import annotations

from typing import Literal

from nbgpu.client.cluster import time_limit
from nbgpu.config import ClusterConfig
from nbgpu.config.conditions import conditions
from nbgpu.config.launchers import LAUNCHERS
from nbgpu.config.settings import control_fields
from nbgpu.protocol.records import Device
from nbgpu.ui.controls.fields import Field

_GROUP = "Hosts"
_DECIDING = ("launcher", "on_host_lost")
"""The settings that decide whether other settings apply."""
_ANY_COMPUTE_CAPABILITY = 100.0
"""Higher than that of any GPU, so that no setting is refused because of a GPU that is not known yet."""


class HostControls:
    """The fields of the launcher and of its hosts. Only those that apply to the chosen launcher are shown."""

    def __init__(self) -> None:
        named = [name for group, name, _ in control_fields(ClusterConfig) if group == _GROUP]
        self.fields = {name: Field(ClusterConfig, name) for name in named}
        self.gpus = Field(ClusterConfig, "gpus")
        """The GPUs of every other host, whose devices no card shows."""
        self._show_what_counts()
        for name in _DECIDING:
            self.fields[name].observe(lambda _: self._show_what_counts(), "value")

    @property
    def is_local(self) -> bool:
        """Whether the ranks are on the notebook's host."""
        return LAUNCHERS[self.fields["launcher"].value].IS_LOCAL

    def counts(self, name: str) -> bool:
        """Whether the setting applies to the chosen launcher and to the other current values."""
        if name == "save_before_time_limit":
            return time_limit.may_come(self.fields["launcher"].value)
        decisive = [each for each in conditions(ClusterConfig, name) if each.name in _DECIDING]
        return all(each.holds(self.fields[each.name].value) and self.counts(each.name) for each in decisive)

    def _show_what_counts(self) -> None:
        for name, field in self.fields.items():
            field.layout.display = "" if self.counts(name) else "none"
        self.gpus.layout.display = "none" if self.is_local else ""


def stand_ins(config: ClusterConfig) -> tuple[Device, ...]:
    """Return devices that stand for those of hosts that have not dialled in. Every setting works on them. If
    the number of ranks on a host is not known, each host has one."""
    kind: Literal["cpu", "cuda"] = "cpu" if config.gpus == "none" else "cuda"
    num_ranks = config.num_hosts * (config.gpus_per_node or 1)
    return tuple(Device(kind, "", "", index, 0, _ANY_COMPUTE_CAPABILITY) for index in range(num_ranks))
