"""Asks the ranks where their main threads are; the ranks answer whatever these threads are doing."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbgpu.machine import processes
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import MainThreadState

_ANSWER_BYTES = 65536
_BUSY_SHARE = 0.1
"""A share of a core; on a busy host a rank that computes gets far less than a whole core."""
_STACK_PATIENCE_S = 0.3
_LINE_OF_CELL = re.compile(r", line (\d+) in [^\n]+\n[^\n]+ in run_code\n")
"""The frame above the one in which IPython runs a cell; stacks have the innermost frame first."""


@dataclass(frozen=True)
class Sighting:
    """The state of a rank, and when it was seen."""

    where: MainThreadState
    mono_s: float


@dataclass
class _Request:
    connection: socket.socket
    asked_mono_s: float
    cpu_s: float
    answer: bytes = b""


class Lookout:
    """Asks every rank where it is, and remembers its last answer. No call blocks for longer than its argument
    says.

    Args:
        folder: the cluster's folder.
        pids: the process ids of the ranks.
        seen: a mapping that receives each rank's last answer.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], seen: MutableMapping[int, Sighting]) -> None:
        self._folder = folder
        self._pids = pids
        self.seen = seen
        self._open: dict[int, _Request] = {}
        # Of all kinds of selectors this one costs nothing to make, and few cells ever come to use it.
        self._selector = selectors.PollSelector()

    def ask(self) -> None:
        """Ask each rank that owes no answer; a rank that is gone is not asked."""
        with short_path(self._folder) as folder:
            for rank, pid in self._pids.items():
                # The rank may be gone, or may have stopped listening.
                with suppress(OSError, psutil.NoSuchProcess):
                    if rank not in self._open:
                        self._ask(rank, pid, folder / MainThreadState.socket_name(pid))

    def _ask(self, rank: int, pid: int, path: Path) -> None:
        cpu_s = _cpu_s(pid)
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        self._open[rank] = _Request(connection, time.monotonic(), cpu_s)
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def collect(self, patience_s: float = 0.0) -> None:
        """Receive the answers that are there, and wait for the others for `patience_s`."""
        deadline_s = time.monotonic() + patience_s
        while self._open:
            ready = self._selector.select(max(0.0, deadline_s - time.monotonic()))
            for key, _ in ready:
                self._take(key.data)
            if not ready:
                return

    def _take(self, rank: int) -> None:
        question = self._open[rank]
        try:
            part = question.connection.recv(_ANSWER_BYTES)
        except ConnectionError:  # the rank died in the middle of its answer
            part, question.answer = b"", b""
        question.answer += part
        if not part:
            self._drop(rank)
            if question.answer:
                self.seen[rank] = Sighting(MainThreadState(**json.loads(question.answer)), time.monotonic())

    def silent_s(self, rank: int) -> float:
        """Return for how long the rank has owed an answer, or 0 if it owes none."""
        question = self._open.get(rank)
        return time.monotonic() - question.asked_mono_s if question is not None else 0.0

    def stands_still(self, rank: int) -> bool:
        """Return whether something outside of the rank's process keeps it from going on."""
        return bool(processes.standstill(self._pids[rank]))

    def computes(self, rank: int) -> bool:
        """Return whether a rank that owes an answer has used the CPU since it was asked.

        Raises:
            psutil.NoSuchProcess: the rank is gone.
        """
        question = self._open[rank]
        silent_s = time.monotonic() - question.asked_mono_s
        return (_cpu_s(self._pids[rank]) - question.cpu_s) / silent_s > _BUSY_SHARE

    def silence(self, rank: int) -> str:
        """Return the words that follow the rank's name and say what keeps it from answering, and where it was
        before."""
        question = self._open[rank]
        silent_s = time.monotonic() - question.asked_mono_s
        pid = self._pids[rank]
        if why := processes.standstill(pid):
            return f"does not answer: {why}"
        if processes.waits_in_the_system(pid):
            return f"does not answer for {silent_s:.0f} s: it waits in the operating system, for a disk or a driver"
        try:
            computes = self.computes(rank)
        except psutil.NoSuchProcess:
            return "is gone"
        seen = self.seen.get(rank)
        last = f", last seen {_located(seen.where)}" if seen is not None else ""
        return (
            f"does not answer for {silent_s:.0f} s: it is in C code that holds the GIL "
            f"({'computing' if computes else 'using no CPU'}{last})"
        )

    def cell_line(self, rank: int) -> int | None:
        """Return the line of the cell that a rank is at, even if it holds the GIL, or None if the line is not
        found.

        This sends a signal, which may cut a sleep in C code short: use it for a rank that was interrupted
        anyway.
        """
        stack = self._folder / MainThreadState.stack_name(self._pids[rank])
        before = stack.stat().st_size
        os.kill(self._pids[rank], signal.SIGUSR2)
        deadline_s = time.monotonic() + _STACK_PATIENCE_S
        while time.monotonic() < deadline_s:
            time.sleep(0.01)
            found = _LINE_OF_CELL.search(stack.read_text()[before:])
            if found is not None:
                return int(found[1])
        return None

    def close(self) -> None:
        """Close the connections of open questions."""
        for rank in list(self._open):
            self._drop(rank)
        self._selector.close()

    def _drop(self, rank: int) -> None:
        connection = self._open.pop(rank).connection
        self._selector.unregister(connection)
        connection.close()


def described(where: MainThreadState) -> str:
    """Describe what a rank does.

    For example 'idle', 'loading packages', 'cell line 6: x = f(y)', 'cell line 4, in barrier:
    dist.barrier()'.
    """
    if where.doing == "idle":
        return "idle"
    if where.busy_with and not where.place:
        return where.busy_with
    place = where.place or "busy"
    if where.collective:
        place += f", in {where.collective}"
    return f"{place}: {where.source}" if where.source else place


def _located(where: MainThreadState) -> str:
    if where.doing == "idle":
        return "idle"
    return f"at {where.place}" if where.place else where.busy_with or "busy"


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
