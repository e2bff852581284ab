"""The devices as cards in a page, on which a person chooses GPUs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

from nbgpu.client.host.device_cards import HostDevices
from nbgpu.package import STATIC
from nbgpu.ui.devices.reader import DeviceReader

_PATIENCE_S = 2.0
"""The longest time, in seconds, for which the cell that shows the cards waits for the first reading. NVML
takes a second to start on a machine without persistence mode; without the wait the cards would appear a
moment after the cell."""


class DevicePicker(anywidget.AnyWidget):
    """The cards of all devices, on which a person chooses GPUs. The page asks for a reading each second while
    the cards are in sight; without such a request the devices are not read."""

    _esm = STATIC / "devices.js"
    _css = STATIC / "devices.css"
    devices = traitlets.Dict().tag(sync=True)
    """The devices as `HostDevices.as_json` gives them; empty before the first reading."""
    num_readings = traitlets.Int(0).tag(sync=True)
    """The number of readings, which tells the page that one has come even if nothing has changed."""
    problem = traitlets.Unicode().tag(sync=True)
    """A sentence about why the cards are not live; empty where they are."""
    wanted = traitlets.List(traitlets.Unicode(), allow_none=True, default_value=None).tag(sync=True)
    """The UUIDs that the person has chosen, which only the page writes; None before a choice, where the GPUs
    that are offered count as chosen."""
    disabled = traitlets.Bool(False).tag(sync=True)
    value = traitlets.Tuple()
    """The UUIDs of the chosen GPUs, in the driver's order."""

    def __init__(self) -> None:
        """Ask for the first reading, and wait for it a moment, so that the page gets the cards with the
        widget."""
        super().__init__()
        self.newest: HostDevices | None = None
        """The newest reading of the devices; None before the first."""
        # Messages from the page and readings come on different threads.
        self._lock = threading.RLock()
        self._reader = DeviceReader(self._show, self._complain)
        self.on_msg(self._on_message)
        self.observe(lambda _: self._choose(), "wanted")
        self._reader.ask()
        self._reader.wait(_PATIENCE_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the reading that has begun; return whether it is complete."""
        return self._reader.wait(timeout_s)

    def _on_message(self, _: Any, content: Any, __: Any) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "read":
            self._reader.ask()
        elif kind == "rest":
            self._reader.rest()

    def _show(self, devices: HostDevices) -> None:
        with self._lock:
            self.newest = devices
            self.devices = devices.as_json()
            self.num_readings += 1
            self._choose()

    def _complain(self, problem: str) -> None:
        self.problem = problem

    def _choose(self) -> None:
        """Update the chosen GPUs. `device_picker.ts` has the same rule, so that the page answers a click at
        once."""
        with self._lock:
            if self.newest is not None:
                self.value = tuple(chosen(self.newest, self.wanted))


def chosen(devices: HostDevices, wanted: Sequence[str] | None) -> list[str]:
    """The UUIDs of the GPUs that a person has chosen and that can be chosen now; without a choice (None), of
    the GPUs that are offered.

    So a GPU that another notebook has taken meanwhile is left out, and comes back when it is free.
    """
    if wanted is None:
        return list(devices.proposed)
    return [card.uuid for card in devices.cards if card.uuid in wanted and card.is_choosable]
