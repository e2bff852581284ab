"""The buttons that copy the settings of the control panel, as code and as a command."""

from __future__ import annotations

from collections.abc import Sequence

import anywidget
import traitlets

from nbgpu.config import ClusterConfig, written
from nbgpu.machine.devices import is_part
from nbgpu.package import STATIC
from nbgpu.protocol.records import Device
from nbgpu.ui.controls.form import SettingsForm


class CopyButtons(anywidget.AnyWidget):
    """Two buttons that copy code and a command. Both texts are made before a button is pressed, because a
    page may write to the clipboard only while it handles the press."""

    _esm = STATIC / "copy.js"
    _css = STATIC / "field.css"
    code = traitlets.Unicode().tag(sync=True)
    command = traitlets.Unicode().tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)
    """The reason why there is nothing to copy; empty if there is something."""

    def offer(self, form: SettingsForm, cluster: ClusterConfig, is_started: bool) -> None:
        """Make the code and the command for the values in the form.

        Raises:
            ConfigError: the settings are not valid.
        """
        values, _ = form.read()
        needed = written.differing(form.recipe, form.preset, form.given(values))
        with self.hold_sync():
            self.problem = ""
            self.code = written.as_code(form.recipe, form.preset, needed, cluster, is_started)
            self.command = written.as_command(form.recipe, form.preset, needed, cluster)

    def refuse(self, problem: str) -> None:
        """Let a press show the reason why there is nothing to copy."""
        self.problem = problem


def with_numbers(cluster: ClusterConfig, chosen: Sequence[Device]) -> ClusterConfig:
    """Return the settings with GPUs named by their numbers, which people can read, in place of UUIDs. If one
    of the GPUs is a MIG partition, the UUIDs stay, because all partitions of a GPU have the same number."""
    numbers = {gpu.uuid: str(gpu.index) for gpu in chosen if not is_part(gpu)}
    names = cluster.gpus.split(",")
    if not numbers.keys() >= {*names}:
        return cluster
    return cluster.changed(gpus=",".join(numbers[name] for name in names))
