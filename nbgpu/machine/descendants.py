"""Find and end all descendants of this process, including those in sessions of their own."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
_KILL_PATIENCE_S = 5.0


def adopt_orphans() -> None:
    """Make this process the parent of each of its descendants whose own parent ends, as init is of all
    others.

    A program that detaches itself, such as a daemon, can still be found then (man 2 PR_SET_CHILD_SUBREAPER).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def of_this_process(without: Collection[int] = ()) -> list[psutil.Process]:
    """The running descendants, except for the processes in `without` and their descendants."""
    return _below(psutil.Process(), without)


def _below(process: psutil.Process, without: Collection[int]) -> list[psutil.Process]:
    found = process.children(recursive=True)
    if not without:
        return [child for child in found if _runs(child)]
    parents = {}
    for child in found:
        with suppress(psutil.NoSuchProcess):
            parents[child.pid] = child.ppid()
    return [child for child in found if not _is_within(child.pid, parents, without) and _runs(child)]


def _is_within(pid: int, parents: dict[int, int], roots: Collection[int]) -> bool:
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


class Ending:
    """Ends processes step by step: sends SIGTERM to each one first, and SIGKILL if it does not end.

    Python's resource tracker ignores SIGTERM. It ends after the processes that it serves, once it has removed
    what they left in shared memory.

    Args:
        patience_s: the time between SIGTERM and SIGKILL.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._asked_mono_s: dict[psutil.Process, float] = {}

    def step(self, processes: Iterable[psutil.Process]) -> bool:
        """Send the next signal to each of these processes that is due. Returns whether any process was
        left."""
        now_s = time.monotonic()
        is_left = False
        for process in processes:
            is_left = True
            asked_s = self._asked_mono_s.setdefault(process, now_s)
            with suppress(psutil.NoSuchProcess):
                if asked_s == now_s:
                    process.terminate()
                elif now_s - asked_s > self._patience_s:
                    process.kill()
        return is_left


def end_all(patience_s: float) -> None:
    """End all descendants of this process. Return when none is left, or when one survives SIGKILL."""
    ending = Ending(patience_s)
    give_up_s = time.monotonic() + patience_s + _KILL_PATIENCE_S
    while ending.step(of_this_process()) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
