"""Asks the ranks what their main threads do. Another thread of each rank answers, if it gets the GIL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from nbgpu.host.host import StackReader
from nbgpu.machine.processes import EngineProcess
from nbgpu.protocol.records import MainThreadState


@dataclass(frozen=True)
class StackSample:
    """The state of a rank's main thread, and when it was received, by the monotonic clock."""

    where: MainThreadState
    mono_s: float


class StackSampler:
    """Asks all ranks what their main threads do, and keeps the last answer of each. Only `collect` waits.

    Args:
        processes: the process of each rank.
        make_reader: returns, for the name of a host, the object that asks the ranks there.
        seen: a mapping that receives the last answer of each rank.
    """

    def __init__(
        self,
        processes: Mapping[int, EngineProcess],
        make_reader: Callable[[str], StackReader],
        seen: MutableMapping[int, StackSample],
    ) -> None:
        self._processes = dict(processes)
        self._readers = {host: make_reader(host) for host in {p.host for p in processes.values()}}
        self.seen = seen

    def ask(self) -> None:
        """Ask each rank that owes no answer and whose process is alive."""
        for host, reader in self._readers.items():
            reader.ask([process.pid for process in self._processes.values() if process.host == host])

    def collect(self, patience_s: float = 0.0) -> None:
        """Receive the answers that have arrived, and wait for the others for `patience_s` seconds in all."""
        ranks = {process: rank for rank, process in self._processes.items()}
        deadline_s = time.monotonic() + patience_s
        for host, reader in self._readers.items():
            for pid, where in reader.collect(max(0.0, deadline_s - time.monotonic())).items():
                self.seen[ranks[EngineProcess(host, pid)]] = StackSample(where, time.monotonic())

    def silent_s(self, rank: int) -> float:
        """Return for how many seconds the rank has owed an answer, or 0 if it owes none."""
        reader, pid = self._reader_and_pid(rank)
        return reader.silent_s(pid)

    def stands_still(self, rank: int) -> bool:
        """Return whether something outside of the rank's process keeps it from running, such as SIGSTOP."""
        reader, pid = self._reader_and_pid(rank)
        return bool(reader.standstill(pid))

    def computes(self, rank: int) -> bool | None:
        """Return whether a rank that owes an answer has used the CPU since it was asked, or None if its
        process has ended."""
        reader, pid = self._reader_and_pid(rank)
        return reader.computes(pid)

    def silence(self, rank: int) -> str:
        """Say why a rank does not answer, and what it did before; a message puts the rank's name in front."""
        reader, pid = self._reader_and_pid(rank)
        silent_s = reader.silent_s(pid)
        if reason := reader.standstill(pid):
            return f"does not answer: {reason}"
        if reader.waits_in_the_system(pid):
            return f"does not answer for {silent_s:.0f} s: it waits in the operating system, for a disk or a driver"
        if (computes := reader.computes(pid)) is None:
            return "is gone"
        # What is left is a thread that never gives the GIL to the one that answers.
        seen = self.seen.get(rank)
        last = f", last seen {_located(seen.where)}" if seen is not None else ""
        return (
            f"does not answer for {silent_s:.0f} s: it is in C code that holds the GIL "
            f"({'computing' if computes else 'using no CPU'}{last})"
        )

    def cell_line(self, rank: int) -> int | None:
        """Return the line of the cell that a rank executes, even if it holds the GIL, or None if the line is
        not known.

        This sends a signal, which may cut a sleep in C code short: use it only for a rank that was
        interrupted anyway.
        """
        reader, pid = self._reader_and_pid(rank)
        return reader.cell_line(pid)

    def close(self) -> None:
        """Close the connections of requests that are not answered."""
        for reader in self._readers.values():
            reader.close()

    def _reader_and_pid(self, rank: int) -> tuple[StackReader, int]:
        process = self._processes[rank]
        return self._readers[process.host], process.pid


def described(where: MainThreadState) -> str:
    """Describe what a rank does, such as 'idle', 'loading packages', 'cell line 6: x = f(y)' or 'cell line 4,
    in barrier: dist.barrier()'."""
    if where.doing == "idle":
        return "idle"
    if where.busy_with and not where.place:
        return where.busy_with
    place = where.place or "busy"
    if where.collective:
        place += f", in {where.collective}"
    return f"{place}: {where.source}" if where.source else place


def _located(where: MainThreadState) -> str:
    """Describe what a rank did, for a message that begins with 'last seen'."""
    if where.doing == "idle":
        return "idle"
    return f"at {where.place}" if where.place else where.busy_with or "busy"
