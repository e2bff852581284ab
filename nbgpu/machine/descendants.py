"""Find and end all descendants of this process, including those in sessions of their own."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import psutil

FINISHES_ALONE = "NBGPU_FINISHES_ALONE"
"""Environment variable that marks a process, and its children, that ends by itself when its parent has ended,
such as a writer of logs that reads the rest from a pipe."""

_FINISH_PATIENCE_S = 10.0
"""The time before the first signal for a process that finishes alone."""
_PR_SET_CHILD_SUBREAPER = 36
"""The option's number in linux/prctl.h."""
_POLL_S = 0.01
_KILL_PATIENCE_S = 5.0
"""The longest wait for the end of a process after SIGKILL. A process that hangs in a driver may survive."""


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends (man 2 PR_SET_CHILD_SUBREAPER), so
    that programs that detach themselves, such as daemons, can still be found. By default init adopts them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def of_this_process(without: Collection[int] = ()) -> list[psutil.Process]:
    """Return the running descendants, except for the processes in `without` and their descendants."""
    children = psutil.Process().children(recursive=True)
    parents = {}
    for child in children if without else ():
        with suppress(psutil.NoSuchProcess):
            parents[child.pid] = child.ppid()
    return [child for child in children if not _is_within(child.pid, parents, without) and _runs(child)]


def _is_within(pid: int, parents: dict[int, int], roots: Collection[int]) -> bool:
    """Return whether a process is one of the roots or descends from one.

    Args:
        pid: the process.
        parents: the parent of each process, by pid.
        roots: the pids of the roots.
    """
    while pid in parents:
        if pid in roots:
            return True
        pid = parents[pid]
    return False


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _finishes_alone(process: psutil.Process) -> bool:
    try:
        return FINISHES_ALONE in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


class Ending:
    """Ends processes in steps: each process gets SIGTERM first, and SIGKILL if it does not end.

    A process that finishes alone gets ten seconds before the first signal. Python's resource tracker ignores
    SIGTERM; it ends after the processes that it serves, when it has removed their shared memory.

    Args:
        patience_s: the time between SIGTERM and SIGKILL.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._due_mono_s: dict[psutil.Process, float] = {}
        self._asked: set[psutil.Process] = set()

    def step(self, processes: Iterable[psutil.Process]) -> bool:
        """Send the next signal to each of these processes whose time has come; return whether any process was
        left."""
        now_s = time.monotonic()
        is_left = False
        for process in processes:
            is_left = True
            if process not in self._due_mono_s:
                self._due_mono_s[process] = now_s + (_FINISH_PATIENCE_S if _finishes_alone(process) else 0.0)
            late_s = now_s - self._due_mono_s[process]
            with suppress(psutil.NoSuchProcess):
                if late_s > self._patience_s:
                    process.kill()
                elif late_s >= 0.0 and process not in self._asked:
                    self._asked.add(process)
                    process.terminate()
        return is_left


def end_all(patience_s: float) -> None:
    """End all descendants of this process. Return when none is left, or when the time for both signals is
    over."""
    _end(of_this_process, patience_s)


def end_all_but_those_that_finish(patience_s: float) -> None:
    """End the descendants of this process that are not marked by FINISHES_ALONE."""
    _end(lambda: [process for process in of_this_process() if not _finishes_alone(process)], patience_s)


def _end(list_descendants: Callable[[], list[psutil.Process]], patience_s: float) -> None:
    """End processes by SIGTERM and then SIGKILL. Return when none is left, or when the time for both signals
    is over.

    Args:
        list_descendants: returns the processes that are left. It is called in each step, because they may
            start others.
        patience_s: the time between SIGTERM and SIGKILL.
    """
    ending = Ending(patience_s)
    give_up_s = time.monotonic() + patience_s + _KILL_PATIENCE_S
    if any(map(_finishes_alone, list_descendants())):
        give_up_s += _FINISH_PATIENCE_S
    while ending.step(list_descendants()) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
