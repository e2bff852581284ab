"""Signals to the engines of this host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

from nbgpu.machine import processes


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to engines; one that has ended gets none."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def interrupt(pids: Iterable[int]) -> None:
    """Raise KeyboardInterrupt in the Python code of engines, and end the programs that they run, as Ctrl-C
    would."""
    for pid in pids:
        send([pid], signal.SIGINT)
        processes.interrupt_programs_of(pid)
