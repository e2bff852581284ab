"""Reads the devices for a page or a terminal, on a thread and only on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nbgpu.client.host.device_cards import DeviceCards, HostDevices

LATE_S = 5.0
"""Readings that take longer than this are reported: a driver in trouble may not answer for minutes."""
_LEAST_PERIOD_S = 0.7
"""The least time from one reading to the next, because several views of one panel send requests."""


class DeviceReader:
    """Reads the devices once for each request, on a thread that ends with the reading. So a page that is
    hidden, closed or gone costs nothing.

    Args:
        show: called with each reading, on its thread.
        complain: called with a sentence about a reading that failed or is late, and with '' after a reading
            that succeeded.
    """

    def __init__(self, show: Callable[[HostDevices], None], complain: Callable[[str], None]) -> None:
        """Make a reader that has no thread and has not opened the driver."""
        self._show = show
        self._complain = complain
        self._cards = DeviceCards()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._began_at = ""
        self._is_to_rest = False

    def ask(self) -> None:
        """Begin a reading, unless one has begun and is not complete. Returns at once."""
        with self._lock:
            self._is_to_rest = False
            now_s = time.monotonic()
            is_late = self._thread is not None and now_s - self._began_s > LATE_S
            if self._thread is None:
                pause_s = max(0.0, self._began_s + _LEAST_PERIOD_S - now_s) if self._began_s else 0.0
                self._began_s, self._began_at = now_s + pause_s, time.strftime("%H:%M:%S")
                self._thread = threading.Thread(
                    target=self._read, args=(pause_s,), name="nbgpu-devices", daemon=True
                )
                self._thread.start()
        if is_late:
            self._complain(
                f"The driver of the GPUs has not answered since {self._began_at}. nvidia-smi may hang as well; the "
                "cards show what was known before."
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait for the reading that has begun; return whether it is complete."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def rest(self) -> None:
        """Close the driver until the next request."""
        with self._lock:
            self._is_to_rest = True
            if self._thread is None:
                self._cards.close()

    def _read(self, pause_s: float) -> None:
        """Make one reading, on a thread of its own, and show it; an error is shown, too. `pause_s` keeps
        readings apart."""
        try:
            time.sleep(pause_s)
            self._show(self._cards.read())
            self._complain("")
        except Exception as error:  # noqa: BLE001 - nobody would see it on this thread, so the page shows it
            self._complain(f"The devices cannot be read: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._thread = None
                # `rest` could not close the driver while this thread was using it.
                if self._is_to_rest:
                    self._cards.close()
