"""Work that an interrupt must not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds an interrupt (SIGINT) back until the block has ended, and raises KeyboardInterrupt then.

    Interrupts come to the main thread only: on another one there is nothing to hold back, and neither is there in
    a process that ignores them, as one that a shell has put into the background. A block within such a block adds
    nothing: the interrupt is raised at the end of the outer one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not is_main or before is signal.SIG_IGN or isinstance(before, _Note):
        yield
        return
    note = _Note()
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if note.interrupted:
        raise KeyboardInterrupt


class _Note:
    """A handler of SIGINT that only remembers that an interrupt came."""

    interrupted = False

    def __call__(self, *_: Any) -> None:
        self.interrupted = True
