"""Protect blocks of code from interrupts (SIGINT)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

c_signal = import_module("_signal")
"""The C functions behind the module `signal`, whose own turn each number and handler into an Enum. That takes
twenty times as long, and every cell asks for the handler some ten times."""


class uninterrupted:
    """Delay an interrupt (SIGINT) until the end of the block, and then pass it to the previous handler.

    All code that waits for another thread must run in such a block: an interrupt that is raised within
    `threading.Condition` leaves its lock acquired, and the other thread waits for the lock forever.

    The previous handler usually raises KeyboardInterrupt; in callbacks of an event loop it must be
    ipykernel's, which cancels the cell, because KeyboardInterrupt would end the loop. A nested block has no
    effect: the interrupt is handled at the end of the outer block, or by `take_interrupt`. Only the main
    thread receives interrupts, so the block has no effect in other threads, nor in a process that ignores
    SIGINT, such as a background job of a shell.

    It is a class because every cell enters several such blocks, and contextlib's generators take twice as
    long. As a decorator, it makes each call of the function such a block.
    """

    __slots__ = ("_note",)

    def __init__(self) -> None:
        self._note: Note | None = None

    def __enter__(self) -> None:
        self._note = _record_interrupts()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Restore the previous handler, and pass it an interrupt that came during the block."""
        note, self._note = self._note, None
        if note is not None:
            c_signal.signal(signal.SIGINT, note.before)
            # An error of the block ends the caller's work as an interrupt would, and is more informative.
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
    """Only record an interrupt during the block, in the Note that the block receives.

    A nested block receives the outer block's Note. Nothing is recorded outside of the main thread, if
    interrupts are ignored, or if code in C has set their handler.
    """
    note = _record_interrupts()
    if note is not None:
        try:
            yield note
        finally:
            c_signal.signal(signal.SIGINT, note.before)
        return
    before = c_signal.getsignal(signal.SIGINT)
    yield before if isinstance(before, Note) and _is_main_thread() else Note(before)


def _record_interrupts() -> Note | None:
    """Install a Note as the handler of interrupts, and return it; None if a Note is already installed, and
    where interrupts cannot come or cannot be delayed."""
    if not _is_main_thread():
        return None
    before = c_signal.getsignal(signal.SIGINT)
    # None means that the handler was set in C. Python cannot restore such a handler.
    if isinstance(before, Note) or before in (signal.SIG_IGN, None):
        return None
    note = Note(before)
    c_signal.signal(signal.SIGINT, note)
    return note


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def take_interrupt() -> None:
    """Pass an interrupt that came during the surrounding `uninterrupted` block to the block's previous
    handler.

    Loops that wait call this between two polls, where an interrupt does no harm. Outside of such a block it
    does nothing.
    """
    if not _is_main_thread():
        return
    note = c_signal.getsignal(signal.SIGINT)
    if not isinstance(note, Note) or not note.interrupted:
        return
    note.interrupted = False
    c_signal.signal(signal.SIGINT, note.before)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        c_signal.signal(signal.SIGINT, note)


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
