"""Protect blocks of code from interrupts (SIGINT)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold an interrupt (SIGINT) back until the block has ended, and then pass it to the previous handler.

    That handler usually raises KeyboardInterrupt. In a callback of an event loop that would end the loop and
    not the cell; there ipykernel's own handler, which cancels the cell, must be called.

    Only the main thread gets interrupts, so in another thread this does nothing, and neither does it in a
    process that ignores them, such as one that a shell has put into the background. A nested block adds
    nothing: the interrupt is handled at the end of the outer one, or where `take_interrupt` is called.

    All code that waits for another thread must run in such a block. An interrupt that is raised within
    `threading.Condition` leaves its lock taken, and the other thread then waits for the lock for ever.
    """
    with noted() as note:
        yield
    if note.interrupted and not isinstance(signal.getsignal(signal.SIGINT), Note):
        signal.raise_signal(signal.SIGINT)


@contextmanager
def noted() -> Iterator[Note]:
    """Only record an interrupt during the block, in the Note that the block is given.

    A nested block is given the outer one's note. Where no interrupt can come, or where they are ignored, none
    is recorded.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(before, Note):
        yield before
        return
    note = Note(before)
    # None means that the handler was set in C. Python cannot restore such a handler.
    if not is_main or before in (signal.SIG_IGN, None):
        yield note
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield note
    finally:
        signal.signal(signal.SIGINT, before)


def take_interrupt() -> None:
    """Pass an interrupt that came in the `uninterrupted` block around the caller to the handler from before
    the block.

    Loops that wait call this between two polls, where an interrupt does no harm. Outside of such a block it
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    note = signal.getsignal(signal.SIGINT)
    if not isinstance(note, Note) or not note.interrupted:
        return
    note.interrupted = False
    signal.signal(signal.SIGINT, note.before)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, note)


class Note:
    """A handler of SIGINT that only records that an interrupt came.

    Args:
        before: the handler that it replaces.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.interrupted = False

    def __call__(self, *_: Any) -> None:
        self.interrupted = True
