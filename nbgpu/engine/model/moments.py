"""Time stamps in the work of a device, taken without waiting for the device."""

from __future__ import annotations

import time

import torch


class Moment:
    """A time stamp in the device's work: on a GPU a CUDA event, which the device passes later than the host
    records it.

    Args:
        device: the rank's device.
        stream: the stream whose work is meant; None for the current one, and on a CPU.
    """

    __slots__ = ("_event", "host_s")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        self.host_s = time.monotonic()
        """The host's monotonic clock when the moment was noted."""
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            # The thread in which a collective ends may have another current device.
            self._event.record(stream or torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has come to this moment."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Moment) -> float:
        """Return the time between two moments that the device has passed."""
        if self._event is not None:
            assert later._event is not None, "both are moments of the same device"
            return float(self._event.elapsed_time(later._event)) / 1000
        return later.host_s - self.host_s

    def at_s(self, anchor: Moment) -> float:
        """Return the time of this moment by the host's monotonic clock, in seconds; the device has passed it.

        Args:
            anchor: an earlier moment that the device passed as soon as the host recorded it (`Anchors`).
        """
        return anchor.host_s + anchor.seconds_until(self)


class Anchors:
    """Records moments that connect the clock of a GPU with that of the host.

    They are events on a stream without other work, which the device passes within some microseconds, whatever
    work it has on other streams.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._idle: torch.cuda.Stream | None = None

    def note(self) -> Moment:
        """Record such a moment now."""
        if self.device.type == "cuda" and self._idle is None:
            self._idle = torch.cuda.Stream(self.device, priority=-1)
        return Moment(self.device, self._idle)
