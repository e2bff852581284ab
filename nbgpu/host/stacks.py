"""Asks the ranks of this host where their main threads are; they answer whatever these threads are doing."""

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
"""The share of the time for which a rank that computes has a core, or waits for one, at the least."""
_STACK_PATIENCE_S = 0.3
"""How long the file with the stack is watched after the signal."""
_LINE_OF_CELL = re.compile(r", line (\d+) in [^\n]+\n[^\n]+ in run_code\n")
"""The frame above the one in which IPython runs a cell; stacks have the innermost frame first."""


@dataclass
class _Request:
    """A question to a rank that has no complete answer yet."""

    connection: socket.socket
    asked_mono_s: float
    wanted_cpu_s: float
    answer: bytes = b""


class Stacks:
    """Asks processes of ranks where they are. No call blocks for longer than its argument says.

    Args:
        folder: the cluster's folder on this host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, _Request] = {}
        # Of all kinds of selectors this one costs nothing to make, and few cells ever come to use it.
        self._selector = selectors.PollSelector()

    def ask(self, pids: Iterable[int]) -> None:
        """Ask each process that owes no answer; one that is gone is not asked."""
        with short_path(self._folder) as folder:
            for pid in pids:
                # The process may be gone, or may have stopped listening.
                with suppress(OSError, psutil.NoSuchProcess):
                    if pid not in self._open:
                        self._ask(pid, folder / MainThreadState.socket_name(pid))

    def _ask(self, pid: int, path: Path) -> None:
        """Connect to the socket of a rank. The connection is the question: the rank writes its answer and
        closes."""
        # The CPU time is read before the question, so that `computes` counts all of it since then.
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
        """Return the answers that are there, and those that come within `patience_s`, by process."""
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
        """Read what has come of an answer. Return the answer once the rank has closed the connection, and
        None before that and for a rank that has died."""
        request = self._open[pid]
        try:
            part = request.connection.recv(_ANSWER_BYTES)
        except ConnectionError:  # the rank died in the middle of its answer
            part, request.answer = b"", b""
        request.answer += part
        if part:
            return None
        self._drop(pid)
        return MainThreadState(**json.loads(request.answer)) if request.answer else None

    def silent_s(self, pid: int) -> float:
        """Return for how long the process has owed an answer, or 0 if it owes none."""
        request = self._open.get(pid)
        return time.monotonic() - request.asked_mono_s if request is not None else 0.0

    def computes(self, pid: int) -> bool | None:
        """Return whether a process that owes an answer has used the CPU, or waited for its turn there, since
        it was asked; None if it is gone."""
        request = self._open[pid]
        silent_s = time.monotonic() - request.asked_mono_s
        try:
            return (_wanted_cpu_s(pid) - request.wanted_cpu_s) / silent_s > _BUSY_SHARE
        except psutil.NoSuchProcess:
            return None

    def waits_in_the_system(self, pid: int) -> bool:
        """Return whether the process waits in the operating system, for a disk or a driver."""
        return processes.waits_in_the_system(pid)

    def standstill(self, pid: int) -> str:
        """Return why something outside of the process keeps it from running, such as SIGSTOP, with the
        remedy; empty if nothing does."""
        return processes.standstill(pid)

    def cell_line(self, pid: int) -> int | None:
        """Return the line of the cell that a rank is at, even if it holds the GIL, or None if the line is not
        found.

        This sends a signal, which may cut a sleep in C code short: use it for a rank that was interrupted
        anyway.
        """
        stack = self._folder / MainThreadState.stack_name(pid)
        before = stack.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        deadline_s = time.monotonic() + _STACK_PATIENCE_S
        while time.monotonic() < deadline_s:
            time.sleep(0.01)
            found = _LINE_OF_CELL.search(stack.read_text()[before:])
            if found is not None:
                return int(found[1])
        return None

    def close(self) -> None:
        """Close the connections of open questions."""
        for pid in list(self._open):
            self._drop(pid)
        self._selector.close()

    def _drop(self, pid: int) -> None:
        connection = self._open.pop(pid).connection
        self._selector.unregister(connection)
        connection.close()


def _wanted_cpu_s(pid: int) -> float:
    """Return the CPU time of a process plus its main thread's wait for a core, in seconds. On a busy host a
    process that computes may have next to no CPU time. Its other threads do not count: while the GIL is held
    they wake up 200 times a second to ask for it, and wait for a core each time."""
    times = psutil.Process(pid).cpu_times()
    use = processes.main_thread_core_use(pid)
    return float(times.user + times.system) + (use.waited_s if use is not None else 0.0)
