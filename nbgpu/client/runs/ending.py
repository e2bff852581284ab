"""The end of work on a thread, such as a run: callers can wait for it or register callbacks."""

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
    """The end of some work, which happens once.

    Args:
        name: the name of the work, for messages.
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
        """Whether the work has ended and all callbacks have returned."""
        return self._over.is_set()

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: at the end of the work, before `wait` returns, or at once if it has ended."""
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
                # The other callbacks are called all the same, and `wait` returns.
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

        The kernel's interrupt calls `stop`, waits until the work has ended, and is then raised. A second
        interrupt calls `stop` again, and is raised after `patience_s` seconds at the latest.

        Args:
            timeout_s: the longest time to wait, in seconds; None for no limit.
            describe: returns the progress of the work, for the message of TimeoutError.
            stop: asks the work to end.
            patience_s: how long to wait after a second interrupt, in seconds.
            meanwhile: is called several times a second.

        Raises:
            TimeoutError: the work did not end within `timeout_s`.
            KeyboardInterrupt: the kernel was interrupted.
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
        wait."""
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
