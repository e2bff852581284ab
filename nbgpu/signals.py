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

    Interrupts come to the main thread only: on another one there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
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
