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
        names = [name for group, name, _ in control_fields(ClusterConfig) if group == _GROUP]
        # The GPUs of other hosts have a field, because there are no cards of them.
        self.fields = {name: Field(ClusterConfig, name) for name in [*names, "gpus"]}
        self._show_applicable()
        for name in _DECIDING:
            self.fields[name].observe(lambda _: self._show_applicable(), "value")

    @property
    def is_local(self) -> bool:
        """Whether the ranks are on the notebook's host."""
        return LAUNCHERS[self.fields["launcher"].value].IS_LOCAL

    def applies(self, name: str) -> bool:
        """Whether a cluster's setting has a field and an effect with the chosen launcher and the other
        values."""
        if name == "gpus":
            return not self.is_local
        if name == "save_before_time_limit":
            return time_limit.may_come(self.fields["launcher"].value)
        decisive = [condition for condition in conditions(ClusterConfig, name) if condition.name in _DECIDING]
        return all(c.holds(self.fields[c.name].value) and self.applies(c.name) for c in decisive)

    def _show_applicable(self) -> None:
        for name, field in self.fields.items():
            field.layout.display = "" if self.applies(name) else "none"


def stand_ins(config: ClusterConfig) -> tuple[Device, ...]:
    """Return assumed devices for the ranks on hosts that have not dialled in, on which every setting is
    valid. A host has one rank if `gpus_per_node` does not say how many."""
    kind: Literal["cpu", "cuda"] = "cpu" if config.gpus == "none" else "cuda"
    num_ranks = config.num_hosts * (config.gpus_per_node or 1)
    return tuple(Device(kind, "", "", index, 0, _ANY_COMPUTE_CAPABILITY) for index in range(num_ranks))
