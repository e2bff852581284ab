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
    a process that ignores them, as one that a shell has put into the background.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    noted = False

    def note(*_: Any) -> None:
        nonlocal noted
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        raise KeyboardInterrupt
