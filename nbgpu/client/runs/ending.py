"""The end of work in threads, such as a run: callers can wait for it, and callbacks are called when it
comes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from nbgpu.client.ipykernel import aborting
from nbgpu.machine.signals import take_interrupt, uninterrupted

_WAIT_PERIOD_S = 0.1

State = TypeVar("State")


class Completion(Generic[State]):
    """The end of some work, which happens once: waited for, or followed by callbacks.

    Args:
        name: the name, for messages, of the work that ends.
        log: the logger for exceptions of callbacks.
    """

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._name = name
        self._log = log
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.state: State | None = None
        """The state in which the work ended, or None before its end."""
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether everything that belongs to the end is done."""
        return self._over.is_set()

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the end comes, before `wait` returns, or at once if it has come
        already."""
        with self._lock:
            if self.state is None:
                self._callbacks.append(callback)
                return
        callback()

    def complete(self, state: State, last: Callable[[], None]) -> None:
        """Mark the work as ended in this state: call all callbacks, and `last` after them."""
        with self._lock:
            self.state = state
            callbacks = [*self._callbacks, last]
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001
                # A callback that fails must not prevent the end, nor keep the next callback from its turn.
                self._log.exception("%s has ended, and showing that failed", self._name)
        self._over.set()

    def wait_at_most(self, timeout_s: float) -> None:
        """Wait for the end, at most `timeout_s`, and raise nothing if it does not come."""
        self._over.wait(timeout_s)

    @uninterrupted()
    def wait(
        self,
        timeout_s: float | None,
        describe: Callable[[], str],
        stop: Callable[[], None],
        patience_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the end.

        The kernel's interrupt calls `stop`, waits for its effect, and is then raised. Another one meanwhile
        calls `stop` again, and is raised after `patience_s` at the latest. `meanwhile` is called several
        times a second.

        Raises:
            TimeoutError: the end did not come within `timeout_s` seconds; `describe` says how far the work
                is.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._over.wait(_WAIT_PERIOD_S):
                take_interrupt()
                meanwhile()
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise TimeoutError(f"{self._name} is still {describe()} after {timeout_s:g} s")
        except KeyboardInterrupt:
            aborting.keep_what_comes_now()
            if not self._stop_and_wait(stop, math.inf, meanwhile):
                self._stop_and_wait(stop, patience_s, meanwhile)
            raise

    def _stop_and_wait(
        self, stop: Callable[[], None], patience_s: float, meanwhile: Callable[[], None]
    ) -> bool:
        """Call `stop`, and wait for the end for at most `patience_s`. Return False if an interrupt ended the
        wait. `meanwhile` is called between two polls."""
        try:
            if not self.over:
                stop()
            give_up_s = time.monotonic() + patience_s
            while not self._over.wait(_WAIT_PERIOD_S) and time.monotonic() < give_up_s:
                # Raises KeyboardInterrupt if there was an interrupt since the last poll.
                take_interrupt()
                meanwhile()
        except KeyboardInterrupt:
            return False
        return True
