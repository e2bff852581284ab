"""Starts, watches and ends the engines of a cluster. A new engine is a spare until it becomes a rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from nbgpu.client.engines.host_pool import GONE_WITH_HOST, HostPool
from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.errors import ClusterError
from nbgpu.host.host import ExitProbe
from nbgpu.machine.processes import CoreUse, EngineProcess
from nbgpu.machine.signals import take_interrupt

_ARRIVAL_PATIENCE_S = 60.0
_DEATH_PATIENCE_S = 10.0
_POLL_PERIOD_S = 0.01


def by_host(processes: Iterable[EngineProcess]) -> dict[str, list[int]]:
    """The pids of processes by the names of their hosts, so that each host gets one message for all."""
    pids: dict[str, list[int]] = {}
    for process in processes:
        pids.setdefault(process.host, []).append(process.pid)
    return pids


class Lifetimes:
    """Starts, watches and ends the engines of a cluster.

    Args:
        pool: the hosts of the engines.
        assignment: the engines of the ranks and the spares; this object changes it.
        note: a function that is called after a new spare was added, to store the assignment.
    """

    def __init__(self, pool: HostPool, assignment: RankAssignment, note: Callable[[], None]) -> None:
        self._pool = pool
        self._assignment = assignment
        self._note = note
        self._probes: dict[EngineProcess, ExitProbe] = {}
        self._why_ended: dict[EngineProcess, str] = {}
        """How a process ended, in words, for the processes that this object has ended."""

    def exit_probe(self, process: EngineProcess) -> ExitProbe:
        """Return the probe that tells fast whether the process of a rank is exiting, and make it at the first
        call."""
        if process not in self._probes:
            for replaced in set(self._probes) - set(self._assignment.processes.values()):
                self._probes.pop(replaced).close()
            self._probes[process] = self._pool.process_host(process).glance(process.pid)
        return self._probes[process]

    def close(self) -> None:
        """Stop watching the processes."""
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()

    def how_ended(self, process: EngineProcess) -> str | None:
        """Return how a process ended, such as 'is gone, with exit code 1', or None while it lives."""
        ended = self._pool.how_ended(process)
        # If a host is lost, its ranks may be ended here one by one, but the loss is the reason to report.
        return ended if ended in (None, GONE_WITH_HOST) else self._why_ended.get(process, ended)

    def core_uses(self, processes: Mapping[int, EngineProcess]) -> dict[int, CoreUse]:
        """Return how long processes have used and waited for CPU cores, by the keys of the argument; a
        process that has ended is left out."""
        by_process = {
            EngineProcess(host, pid): used
            for host, pids in by_host(processes.values()).items()
            for pid, used in self._pool.hosts[host].core_uses(pids).items()
        }
        return {key: by_process[process] for key, process in processes.items() if process in by_process}

    def end(self, process: EngineProcess, name: str, why: str = "") -> None:
        """End a process, and wait until it has ended.

        Args:
            name: the name of its rank, for a message.
            why: what `how_ended` returns afterwards; empty for the usual text.

        Raises:
            ClusterError: the process does not end.
        """
        if not self._pool.process_host(process).is_ending(process.pid):
            self._why_ended[process] = why or "was ended, to be replaced"
        self._kill([process])
        self._wait_for_end(process, f"{name} (pid {process.pid})")

    def end_left(self, processes: Sequence[EngineProcess]) -> None:
        """End processes whose ranks have left the group, and wait until they have ended.

        Raises:
            ClusterError: one does not end.
        """
        self._kill(processes)
        for process in processes:
            if process in self._probes:
                self._probes.pop(process).close()
            self._wait_for_end(process, f"a rank that has left (pid {process.pid})")

    def _kill(self, processes: Iterable[EngineProcess]) -> None:
        for host, pids in by_host(processes).items():
            self._pool.hosts[host].send_signal(pids, signal.SIGKILL)

    def _wait_for_end(self, process: EngineProcess, name: str) -> None:
        """Wait until a process has ended after SIGKILL. Raise ClusterError if it hangs in the kernel."""
        give_up_s = time.monotonic() + _DEATH_PATIENCE_S
        while self._pool.how_ended(process) is None:
            if time.monotonic() > give_up_s:
                raise ClusterError(
                    f"the process of {name} does not end: it waits in the kernel or its driver. "
                    "%nbgpu stop, then look at it with ps"
                )
            time.sleep(_POLL_PERIOD_S)
            take_interrupt()

    def new_spare(self, host: str) -> int:
        """Start a new engine on a host, and return its number.

        The engine is a spare until it becomes a rank. If an interrupt comes in between, the next replacement
        of a rank uses the engine.
        """
        new: list[int] = []

        def register(process: EngineProcess, engine: int) -> None:
            self._assignment.spares[engine] = process
            new.append(engine)
            self._note()

        self._pool.new_engine(host, register)
        (engine,) = new
        return engine

    def take_spares(self, hosts: Sequence[str]) -> list[int]:
        """Return the number of a spare for each of these hosts, and start a new engine where a host has no
        spare left. A host may be named several times."""
        for engine, process in list(self._assignment.spares.items()):
            if self._pool.how_ended(process) is not None:
                del self._assignment.spares[engine]
        free = dict(self._assignment.spares)
        taken = []
        for host in hosts:
            there = [engine for engine, process in free.items() if process.host == host]
            engine = there[0] if there else self.new_spare(host)
            free.pop(engine, None)
            taken.append(engine)
        return taken

    def assign_spares(self, spare_of: Mapping[int, int]) -> None:
        """Give ranks new engines: wait until these spares have registered, and assign them to the ranks.

        Args:
            spare_of: ipyparallel's number of the spare for each rank.

        Raises:
            ClusterError: a spare has ended or does not register in time; all of these spares were ended.
        """
        try:
            self._wait_until_registered(spare_of.values())
        except ClusterError:
            self.dismiss({engine: self._assignment.spares[engine] for engine in spare_of.values()})
            raise
        for rank, engine in spare_of.items():
            self._assignment.engines[rank] = engine
            self._assignment.processes[rank] = self._assignment.spares.pop(engine)

    def dismiss(self, engines: Mapping[int, EngineProcess]) -> None:
        """End spares, given by their numbers, that do not become ranks."""
        self._kill(engines.values())
        for engine in engines:
            self._assignment.spares.pop(engine, None)

    def _wait_until_registered(self, arriving: Collection[int]) -> None:
        """Wait until these spares have registered. Raise ClusterError if one has ended or is late."""
        give_up_s = time.monotonic() + _ARRIVAL_PATIENCE_S
        while missing := [engine for engine in arriving if engine not in self._pool.client.ids]:
            for process in (self._assignment.spares[engine] for engine in missing):
                host = self._pool.process_host(process)
                if how := self._pool.how_ended(process):
                    raise ClusterError(f"a new engine (pid {process.pid}) {how}. {host.log_tail()}")
                if time.monotonic() > give_up_s:
                    raise ClusterError(
                        f"a new engine did not come within {_ARRIVAL_PATIENCE_S:g} s. {host.log_tail()}"
                    )
            time.sleep(_POLL_PERIOD_S)
            take_interrupt()
