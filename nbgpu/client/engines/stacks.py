"""Asks the ranks where their main threads are; the ranks answer whatever these threads are doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from nbgpu.host.host import StackReader
from nbgpu.machine.processes import EngineProcess
from nbgpu.protocol.records import MainThreadState


@dataclass(frozen=True)
class StackSample:
    """The state of a rank, and when it was seen."""

    where: MainThreadState
    mono_s: float


class StackSampler:
    """Asks every rank where it is, and remembers its last answer. No call blocks for longer than its argument
    says.

    Args:
        processes: the processes of the ranks.
        on: a function that makes, for the name of a host, the object that asks the ranks there.
        seen: a mapping that receives each rank's last answer.
    """

    def __init__(
        self,
        processes: Mapping[int, EngineProcess],
        on: Callable[[str], StackReader],
        seen: MutableMapping[int, StackSample],
    ) -> None:
        self._processes = dict(processes)
        self._stacks = {host: on(host) for host in {process.host for process in processes.values()}}
        self.seen = seen

    def ask(self) -> None:
        """Ask each rank that owes no answer; a rank that is gone is not asked."""
        for host, stacks in self._stacks.items():
            stacks.ask([process.pid for process in self._processes.values() if process.host == host])

    def collect(self, patience_s: float = 0.0) -> None:
        """Receive the answers that are there, and wait for the others for `patience_s`."""
        rank_of = {process: rank for rank, process in self._processes.items()}
        deadline_s = time.monotonic() + patience_s
        for host, stacks in self._stacks.items():
            for pid, where in stacks.collect(max(0.0, deadline_s - time.monotonic())).items():
                self.seen[rank_of[EngineProcess(host, pid)]] = StackSample(where, time.monotonic())

    def silent_s(self, rank: int) -> float:
        """Return for how long the rank has owed an answer, or 0 if it owes none."""
        stacks, pid = self._at(rank)
        return stacks.silent_s(pid)

    def stands_still(self, rank: int) -> bool:
        """Return whether something outside of the rank's process keeps it from going on."""
        stacks, pid = self._at(rank)
        return bool(stacks.standstill(pid))

    def computes(self, rank: int) -> bool | None:
        """Return whether a rank that owes an answer has used the CPU since it was asked; None if it is
        gone."""
        stacks, pid = self._at(rank)
        return stacks.computes(pid)

    def silence(self, rank: int) -> str:
        """Return the words that follow the rank's name and say what keeps it from answering, and where it was
        before."""
        stacks, pid = self._at(rank)
        silent_s = stacks.silent_s(pid)
        if why := stacks.standstill(pid):
            return f"does not answer: {why}"
        if stacks.waits_in_the_system(pid):
            return f"does not answer for {silent_s:.0f} s: it waits in the operating system, for a disk or a driver"
        if (computes := stacks.computes(pid)) is None:
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
        stacks, pid = self._at(rank)
        return stacks.cell_line(pid)

    def close(self) -> None:
        """Close the connections of open questions."""
        for stacks in self._stacks.values():
            stacks.close()

    def _at(self, rank: int) -> tuple[StackReader, int]:
        process = self._processes[rank]
        return self._stacks[process.host], process.pid


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
    """Describe where a rank was, in words that follow 'last seen'."""
    if where.doing == "idle":
        return "idle"
    return f"at {where.place}" if where.place else where.busy_with or "busy"
