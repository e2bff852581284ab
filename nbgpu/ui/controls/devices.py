"""The part of the control panel that chooses the devices of a new cluster, and their hosts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets as w

from nbgpu.config import ClusterConfig
from nbgpu.config.conditions import site_defaults
from nbgpu.config.settings import as_text, control_fields
from nbgpu.machine.devices import DEFAULT_CPU_RANKS
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.ui.controls.device_picker import DevicePicker
from nbgpu.ui.controls.fields import Field
from nbgpu.ui.controls.hosts import HostControls

_GROUP = "Devices"
_ON_OTHER_HOSTS = "The ranks are on other hosts (see <i>Hosts</i> below), and their devices are known once the hosts are there."


class DeviceControls:
    """The controls of the devices: GPUs to use, the number of CPU ranks, or the hosts that have them."""

    def __init__(self) -> None:
        """Make the cards and the fields. Only fields that apply to the chosen launcher are shown."""
        self.device_fields = {
            name: Field(ClusterConfig, name)
            for group, name, _ in control_fields(ClusterConfig)
            if group == _GROUP and name != "gpus"
        }
        """The fields of the devices' settings, by name. The cards take the place of a field for `gpus`."""
        self.ranks = self.device_fields["ranks"]
        self.gpus = DevicePicker()
        self.gpus.observe(lambda _: self._show_ranks(), ["value", "devices"])
        self._show_ranks()
        self.hosts = HostControls()
        self._note = w.HTML()
        self._cluster_is_elsewhere = False
        self._elsewhere = w.HTML(_ON_OTHER_HOSTS)
        self.box = w.VBox([self.gpus, self._elsewhere, self._note])
        self._show_applicable()
        self.hosts.fields["launcher"].observe(lambda _: self._show_applicable(), "value")

    def _show_applicable(self) -> None:
        is_local = self.hosts.is_local
        # The cards of this host say nothing about a cluster that is in use on others.
        self.gpus.layout.display = "" if is_local and not self._cluster_is_elsewhere else "none"
        self._elsewhere.layout.display = "none" if is_local or self._cluster_is_elsewhere else ""
        for name, field in self.device_fields.items():
            field.layout.display = "" if self.hosts.applies(name) else "none"

    def show_cluster(self, note: str, is_elsewhere: bool) -> None:
        """Show a sentence about the cluster that is in use, empty for none, and hide the cards of this host
        if that cluster has its ranks on other hosts."""
        self._note.value = f'<div style="line-height:1.4">{html.escape(note)}</div>'
        self._cluster_is_elsewhere = is_elsewhere
        self._show_applicable()

    def _show_ranks(self) -> None:
        """Set the default number of ranks to the number of chosen GPUs, and show it unless the person has
        typed another one."""
        devices = self.gpus.newest
        if devices is not None and len(devices.cards) == 1:
            self.ranks.label = "CPU ranks"
        is_typed = self.ranks.value != self.ranks.standard
        self.ranks.standard = as_text(len(self.gpus.value) or DEFAULT_CPU_RANKS)
        if not is_typed:
            self.ranks.show(self.ranks.standard)
        self.ranks.changed = self.ranks.value != self.ranks.standard

    @property
    def fields(self) -> dict[str, Field]:
        """All fields of settings that the user types, by name."""
        return self.device_fields | self.hosts.fields

    @property
    def applicable(self) -> dict[str, Field]:
        """The fields whose settings apply to the chosen launcher."""
        return {name: field for name, field in self.fields.items() if self.hosts.applies(name)}

    def inputs(self) -> list[w.Widget]:
        """All controls of the devices."""
        return [self.gpus, *self.fields.values()]

    def values(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a cluster: the values of the applicable fields, and on this host the chosen
        GPUs."""
        if not self.hosts.is_local:
            return dict(typed)
        # Before the first reading of the GPUs the cluster gets the default.
        default = site_defaults(ClusterConfig, {"launcher": "local"}).get("gpus", gpus_setting.AUTO)
        gpus = default if self.gpus.newest is None else ",".join(self.gpus.value) or gpus_setting.NONE
        return {"gpus": gpus, **typed}
