"""Protect blocks of code from interrupts (SIGINT)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class uninterrupted:
    """Hold an interrupt (SIGINT) back until the block has ended, and then pass it to the previous handler.

    That handler usually raises KeyboardInterrupt. In a callback of an event loop that would end the loop and
    not the cell; there ipykernel's own handler, which cancels the cell, must be called.

    Only the main thread gets interrupts, so in another thread this does nothing, and neither does it in a
    process that ignores them, such as one that a shell has put into the background. A nested block adds
    nothing: the interrupt is handled at the end of the outer one, or where `take_interrupt` is called.

    All code that waits for another thread must run in such a block. An interrupt that is raised within
    `threading.Condition` leaves its lock taken, and the other thread then waits for the lock for ever.

    A class, because every cell passes through several such blocks, and contextlib's generators take twice as
    long. As a decorator, it makes each call of the function such a block.
    """

    __slots__ = ("_note",)

    def __init__(self) -> None:
        self._note: Note | None = None

    def __enter__(self) -> None:
        self._note = _record_interrupts()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Restore the handler of before, and pass it an interrupt that has come during the block."""
        note, self._note = self._note, None
        if note is not None:
            signal.signal(signal.SIGINT, note.before)
            # An error of the block ends the caller's work as an interrupt would, and says more.
            if note.interrupted and error is None:
                signal.raise_signal(signal.SIGINT)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with uninterrupted():
                return function(*args, **kwargs)

        return guarded


@contextmanager
def noted() -> Iterator[Note]:
    """Only record an interrupt during the block, in the Note that the block is given.

    A nested block is given the outer one's note. Where no interrupt can come, where they are ignored, or
    where code in C has set their handler, none is recorded.
    """
    note = _record_interrupts()
    if note is not None:
        try:
            yield note
        finally:
            signal.signal(signal.SIGINT, note.before)
        return
    before = signal.getsignal(signal.SIGINT)
    yield before if isinstance(before, Note) and _is_main_thread() else Note(before)


def _record_interrupts() -> Note | None:
    """Begin to record interrupts; None where that is done already, where no interrupt can come, or where none
    can be held back."""
    if not _is_main_thread():
        return None
    before = signal.getsignal(signal.SIGINT)
    # None means that the handler was set in C. Python cannot restore such a handler.
    if isinstance(before, Note) or before in (signal.SIG_IGN, None):
        return None
    note = Note(before)
    signal.signal(signal.SIGINT, note)
    return note


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def take_interrupt() -> None:
    """Pass an interrupt that came in the `uninterrupted` block around the caller to the handler from before
    the block.

    Loops that wait call this between two polls, where an interrupt does no harm. Outside of such a block it
    does nothing.
    """
    if not _is_main_thread():
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
