"""Keep interrupts and the memory limit away while a failure is put into words."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from nbgpu.engine.memory import limit as memory_limit


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores interrupts while a failure is put into words: the client interrupts again until the rank is
    back, and that would only spoil the answer. Nor does the rank's memory limit hold meanwhile. For the main
    thread."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with memory_limit.lifted():
            yield
    finally:
        signal.signal(signal.SIGINT, previous)
