"""Asks the ranks of this host for the stacks of their main threads. Another thread of the rank answers, so
that the answer comes whatever the main thread does, unless it holds the GIL."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbgpu.machine import processes
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import MainThreadState

_ANSWER_BYTES = 65536
_BUSY_SHARE = 0.1
"""A rank that has a core, or waits for one, for this share of the time is computing."""
_STACK_PATIENCE_S = 0.3
"""The time for which the stack is awaited in its file after the signal."""
_LINE_OF_CELL = re.compile(r", line (\d+) in [^\n]+\n[^\n]+ in run_code\n")
"""The frame of the cell, which IPython's `run_code` calls; the innermost frame of a stack comes first."""


@dataclass
class _Request:
    """A request to a rank without a complete answer yet."""

    connection: socket.socket
    asked_mono_s: float
    wanted_cpu_s: float
    """The value of `_wanted_cpu_s` at the request."""
    answer: bytes = b""
    """The part of the answer that has been received."""


class Stacks:
    """Asks ranks for the stacks of their main threads. Only `collect` and `cell_line` may wait.

    Args:
        folder: the cluster's folder on this host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, _Request] = {}
        # Few cells use the selector, and poll's is the cheapest to create.
        self._selector = selectors.PollSelector()

    def ask(self, pids: Iterable[int]) -> None:
        """Ask each process without an open request; processes that have ended are left out."""
        with short_path(self._folder) as folder:
            for pid in pids:
                # The process may have ended, or may no longer listen.
                with suppress(OSError, psutil.NoSuchProcess):
                    if pid not in self._open:
                        self._ask(pid, folder / MainThreadState.socket_name(pid))

    def _ask(self, pid: int, path: Path) -> None:
        """Connect to the socket of a rank. The connection itself is the request: the rank writes its answer
        and closes it."""
        # The CPU time is read before the request, so that `computes` counts everything after the request.
        wanted_cpu_s = _wanted_cpu_s(pid)
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        self._open[pid] = _Request(connection, time.monotonic(), wanted_cpu_s)
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def collect(self, patience_s: float = 0.0) -> dict[int, MainThreadState]:
        """Return the answers, by pid, that are available or arrive within `patience_s` seconds."""
        answers: dict[int, MainThreadState] = {}
        deadline_s = time.monotonic() + patience_s
        while self._open:
            ready = self._selector.select(max(0.0, deadline_s - time.monotonic()))
            for key, _ in ready:
                if (answer := self._receive(key.data)) is not None:
                    answers[key.data] = answer
            if not ready:
                break
        return answers

    def _receive(self, pid: int) -> MainThreadState | None:
        """Read the next part of an answer. Return the answer if it is complete, because the rank has closed
        the connection; else None, also for a rank that has died."""
        request = self._open[pid]
        try:
            part = request.connection.recv(_ANSWER_BYTES)
        except ConnectionError:  # the rank has died during its answer
            part, request.answer = b"", b""
        request.answer += part
        if part:
            return None
        self._drop(pid)
        return MainThreadState(**json.loads(request.answer)) if request.answer else None

    def silent_s(self, pid: int) -> float:
        """Return the seconds since the open request to a process, or 0 if there is none."""
        request = self._open.get(pid)
        return time.monotonic() - request.asked_mono_s if request is not None else 0.0

    def computes(self, pid: int) -> bool | None:
        """Return whether a process with an open request has used a core, or waited for one, since the
        request; None if the process has ended."""
        request = self._open[pid]
        silent_s = time.monotonic() - request.asked_mono_s
        try:
            return (_wanted_cpu_s(pid) - request.wanted_cpu_s) / silent_s > _BUSY_SHARE
        except psutil.NoSuchProcess:
            return None

    def waits_in_the_system(self, pid: int) -> bool:
        """Return whether the process is in an uninterruptible wait of the kernel, for a disk or a driver."""
        return processes.waits_in_the_system(pid)

    def standstill(self, pid: int) -> str:
        """Return why the process is stopped from outside, such as by SIGSTOP, with the remedy; empty if it
        is not."""
        return processes.standstill(pid)

    def cell_line(self, pid: int) -> int | None:
        """Return the line of the cell that a rank is running, even if it holds the GIL; None if the line
        cannot be determined.

        This sends SIGUSR2, at which the rank writes its stack to a file. The signal may cut a sleep in C code
        short, so this is only for ranks that have been interrupted anyway.
        """
        stack = self._folder / MainThreadState.stack_name(pid)
        before = stack.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        deadline_s = time.monotonic() + _STACK_PATIENCE_S
        while time.monotonic() < deadline_s:
            time.sleep(0.01)
            if (match := _LINE_OF_CELL.search(stack.read_text()[before:])) is not None:
                return int(match[1])
        return None

    def close(self) -> None:
        """Close the connections of open requests."""
        for pid in list(self._open):
            self._drop(pid)
        self._selector.close()

    def _drop(self, pid: int) -> None:
        connection = self._open.pop(pid).connection
        self._selector.unregister(connection)
        connection.close()


def _wanted_cpu_s(pid: int) -> float:
    """Return the CPU time of a process plus its main thread's wait for a core, in seconds. The wait counts
    because a computing process may get almost no CPU time on a busy host. The waits of other threads do not
    count, because threads that wait for the GIL wake up 200 times a second and wait for a core each time."""
    times = psutil.Process(pid).cpu_times()
    use = processes.main_thread_core_use(pid)
    return float(times.user + times.system) + (use.waited_s if use is not None else 0.0)
