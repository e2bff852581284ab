"""The thread that asks for how long the hosts are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.text.durations import duration

WARNING_BEFORE_END_S = 120.0
"""Enough for a checkpoint of a large model, and for the variables."""
_ASK_PERIOD_S = 60.0
_RUN_PATIENCE_S = 90.0
_RUN_LOOK_S = 0.1


class TimeLimitWatch:
    """Asks on a thread of its own for how long the hosts are there, and acts once when that is not long.

    Args:
        time_left_s: a function that returns the time left, or None if there is no limit or nobody knows.
        warn: is called on the thread, with the time left as the beginning of a sentence.
        can_save: a function that returns whether `save` may be called.
        save: is called after that, on the notebook's event loop, and so never within another call of the
            notebook's. Where there is no loop it is not called.
    """

    def __init__(
        self,
        time_left_s: Callable[[], float | None],
        warn: Callable[[str], None],
        can_save: Callable[[], bool],
        save: Callable[[str], None],
    ) -> None:
        self._time_left_s = time_left_s
        self._warn = warn
        self._can_save = can_save
        self._save = save
        self._closing = threading.Event()
        self._end_mono_s: float | None = None
        self._loop = ipython_shell.event_loop()
        self._thread = threading.Thread(target=self._watch, name="nbgpu-time-limit", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float | None:
        """The time until the hosts are taken away, as said within the last minute; None if there is no
        limit or nobody knows."""
        return None if self._end_mono_s is None else max(0.0, self._end_mono_s - time.monotonic())

    def close(self) -> None:
        """End the watch; later calls do nothing."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        """Ask for the time left until it is short; then warn, wait until no run has the ranks, and save."""
        while (left_s := self._update_time_left()) is None or left_s > WARNING_BEFORE_END_S:
            pause_s = _ASK_PERIOD_S if left_s is None else min(_ASK_PERIOD_S, left_s - WARNING_BEFORE_END_S)
            if self._closing.wait(pause_s):
                return
        reason = f"the job has {duration(left_s)} left"
        self._warn(reason)
        give_up_s = time.monotonic() + _RUN_PATIENCE_S
        while not self._can_save() and time.monotonic() < give_up_s:
            if self._closing.wait(_RUN_LOOK_S):
                return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._save_if_open, reason)

    def _update_time_left(self) -> float | None:
        left_s = self._time_left_s()
        self._end_mono_s = None if left_s is None else time.monotonic() + left_s
        return left_s

    def _save_if_open(self, reason: str) -> None:
        if not self._closing.is_set():
            self._save(reason)
