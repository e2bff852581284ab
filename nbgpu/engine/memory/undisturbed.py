"""Keep interrupts and the memory limit away while a failure is put into words."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from nbgpu.engine.memory import limit as memory_limit


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore interrupts and lift the rank's memory limit while a failure is put into words. For the main
    thread.

    The client repeats its interrupt until the rank is back, which would otherwise only spoil the answer.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with memory_limit.lifted():
            yield
    finally:
        signal.signal(signal.SIGINT, previous)
