"""The signals with which a launcher announces the end of a job, which become a stop with a checkpoint.

A launcher sends SIGTERM before it kills: Slurm at a preemption, Kubernetes before it deletes a pod, torchrun
when it ends or restarts its ranks. SIGUSR1 is what the exported batch script asks Slurm for, some time before
the time limit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from nbgpu.engine.group import activity

_GRACE_S = 28.0
"""How long a rank may take from SIGTERM to its end if it is stuck: torchrun kills it 30 s after the signal,
and a collective whose peer is gone may wait for ever."""
_WORKING_SHARE = 0.02
"""A process that uses this share of a CPU works: one that waits for a peer uses less, for its records."""

_received: signal.Signals | None = None
_steps: Callable[[], int] | None = None


@contextmanager
def listening(step: Callable[[], int]) -> Iterator[None]:
    """Take SIGTERM and SIGUSR1 as requests to stop, so that the run ends with a checkpoint. Call on the main
    thread.

    The handlers stay installed. After the block a signal is no request any more: a SIGTERM ends the process
    only if it still runs `_GRACE_S` later.

    Args:
        step: returns the number of steps done.
    """
    global _steps
    _steps = step
    signal.signal(signal.SIGTERM, _take)
    signal.signal(signal.SIGUSR1, _take)
    try:
        yield
    finally:
        _steps = None


def received() -> signal.Signals | None:
    """Return the signal that this process was sent; None if none was."""
    return _received


def in_words() -> str:
    """Return why this rank stops, as a sentence; empty if no signal was sent."""
    if _received is signal.SIGUSR1:
        return "the job's time is nearly up (SIGUSR1): stopped after this step, with a checkpoint"
    if _received is signal.SIGTERM:
        return "the job is being ended (SIGTERM): stopped after this step, with a checkpoint"
    return ""


def _take(number: int, _: FrameType | None) -> None:
    """Record a signal, and on the first SIGTERM start the thread that ends this process if it is stuck."""
    global _received
    is_first_term = number == signal.SIGTERM and _received is not signal.SIGTERM
    # SIGTERM is the more urgent one, and decides about the exit code.
    if _received is not signal.SIGTERM:
        _received = signal.Signals(number)
    if is_first_term:
        threading.Thread(target=_end_if_stuck, name="nbgpu-ending", daemon=True).start()


def _end_if_stuck() -> None:
    """End this process if it neither takes a step nor works for `_GRACE_S`: then it waits for a peer that has
    ended."""
    steps = _steps
    before = steps() if steps is not None else 0
    cpu_before_s = time.process_time()
    time.sleep(_GRACE_S)
    # A step or a validation may take longer, and a slow disk takes no CPU time.
    works = time.process_time() - cpu_before_s > _WORKING_SHARE * _GRACE_S or activity.current()
    # os._exit, because an ordinary exit would wait for the main thread. The code is the shell's for a process
    # that SIGTERM has ended.
    if steps is None or (steps() == before and not works):
        os._exit(128 + signal.SIGTERM)
