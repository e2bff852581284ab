"""Moments in the work of a device."""

from __future__ import annotations

import time

import torch


class Moment:
    """A moment in the device's work: on a GPU that is when the device comes to it, and not the host.

    Args:
        device: the rank's device. On a GPU the moment stands in its current stream.
    """

    __slots__ = ("_event", "time_s")

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self.time_s = 0.0
        """On the CPU the host's monotonic clock, which all processes of the host share."""
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self.time_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has come to this moment."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Moment) -> float:
        """Return the time between two moments that the device has passed."""
        if self._event is not None:
            assert later._event is not None, "both are moments of the same device"
            return float(self._event.elapsed_time(later._event)) / 1000
        return later.time_s - self.time_s
