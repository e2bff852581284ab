"""Work that an interrupt must not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold an interrupt (SIGINT) back until the block has ended, and give it then to the handler from before.

    That handler raises KeyboardInterrupt, as a rule. In a callback of an event loop this would end the loop and not the
    cell: there ipykernel's own handler, which cancels the cell, must hear of it.

    Interrupts come to the main thread only: on another one there is nothing to hold back, and neither is there in
    a process that ignores them, as one that a shell has put into the background. A block within such a block adds
    nothing: the interrupt is handled at the end of the outer one, or where `take_interrupt` is called.

    So must all code be run that waits for another thread. An interrupt that is raised within `threading.Condition` leaves
    its lock taken, and the other thread waits for that for ever.
    """
    with noted() as note:
        yield
    if note.interrupted and not isinstance(signal.getsignal(signal.SIGINT), Note):
        signal.raise_signal(signal.SIGINT)


@contextmanager
def noted() -> Iterator[Note]:
    """Have an interrupt do no more during the block than be noted in what the block is given.

    A block within such a block is given the outer one's note. Where no interrupt can come, or none is heard, nothing is noted.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(before, Note):
        yield before
        return
    note = Note(before)
    # None stands for a handler that was set in C, and that cannot be put back from here.
    if not is_main or before in (signal.SIG_IGN, None):
        yield note
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield note
    finally:
        signal.signal(signal.SIGINT, before)


def take_interrupt() -> None:
    """Give an interrupt that came in the `uninterrupted` block around the caller to the handler from before the block.

    For loops that wait: between two looks nothing is cut in two. Outside of such a block there is nothing to do.
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
    """A handler of SIGINT that only remembers that an interrupt came.

    Args:
        before: the handler whose place it takes.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.interrupted = False

    def __call__(self, *_: Any) -> None:
        self.interrupted = True
