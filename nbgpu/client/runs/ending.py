"""The end of something that goes on in threads, such as a run: who waits for it, and who is called when it
comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from nbgpu.client.ipykernel import aborting
from nbgpu.machine.signals import take_interrupt, uninterrupted

_WAIT_PERIOD_S = 0.1

State = TypeVar("State")


class Ending(Generic[State]):
    """Comes once.

    Args:
        name: what ends, for messages.
        log: takes what a callback raises.
    """

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._name = name
        self._log = log
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.state: State | None = None
        """How it ended; None before it has."""
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether all that belongs to the end is done."""
        return self._over.is_set()

    def call(self, callback: Callable[[], None]) -> None:
        """Calls back once when it comes, before `wait` returns; at once where it has come already."""
        with self._lock:
            if self.state is None:
                self._callbacks.append(callback)
                return
        callback()

    def come(self, state: State, last: Callable[[], None]) -> None:
        """It comes: all callbacks are called, and `last` after them."""
        with self._lock:
            self.state = state
            callbacks = [*self._callbacks, last]
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001
                # What shows it must not keep it from ending, nor the next callback from its turn.
                self._log.exception("%s has ended, and showing that failed", self._name)
        self._over.set()

    def wait_at_most(self, timeout_s: float) -> None:
        """Waits, and does not complain."""
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
        """Waits for it. The kernel's interrupt calls `stop`, waits `patience_s` for what that does, and is
        then raised.

        `meanwhile` is called several times a second.

        Raises:
            TimeoutError: it did not come within `timeout_s` seconds; `describe` says how far it is.
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
            if not self.over:
                stop()
                give_up_s = time.monotonic() + patience_s
                while not self._over.wait(_WAIT_PERIOD_S) and time.monotonic() < give_up_s:
                    take_interrupt()
            raise
