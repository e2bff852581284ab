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
    nothing: the interrupt is handled at the end of the outer one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    # None stands for a handler that was set in C, and that cannot be put back from here.
    if not is_main or before in (signal.SIG_IGN, None) or isinstance(before, _Note):
        yield
        return
    note = _Note()
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if note.interrupted:
        signal.raise_signal(signal.SIGINT)


class _Note:
    """A handler of SIGINT that only remembers that an interrupt came."""

    interrupted = False

    def __call__(self, *_: Any) -> None:
        self.interrupted = True
