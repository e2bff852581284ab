"""How the number of ranks changes: by `resize`, by the loss of a host, and when a host comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from nbgpu.client.engines.lifetimes import Lifetimes
from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.machine.signals import uninterrupted
from nbgpu.machine.transports import Transport
from nbgpu.protocol.records import Device

_ENGINE_PATIENCE_S = 60.0


class ChangingRanks(ABC):
    """Adds ranks to a running group, and removes some."""

    assignment: RankAssignment
    _chosen: tuple[Device, ...]
    _specs: list[dict[str, Any]]
    _transport: Transport
    _lifetimes: Lifetimes
    _suspects: set[int]
    _note: Callable[[], None]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of ranks."""

    @abstractmethod
    def regroup(self, failed: Collection[int] = ()) -> list[str]:
        """Form the group of these ranks again."""

    @abstractmethod
    def _specs_with_transport(self, transport: Transport) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _host_name(self, rank: int) -> str: ...

    @abstractmethod
    def _wait_for_output_path(self, rank: int, timeout_s: float) -> None: ...

    @uninterrupted()
    def resize(self, chosen: Sequence[Device], transport: Transport, hosts: Sequence[str]) -> list[str]:
        """Form the group with another number of ranks: new engines become the last ranks, or the last ranks
        leave.

        Either all of it happens or, when this raises, the ranks and their engines are those from before. The
        group then has to be formed again. The processes of ranks that leave run until `end_leaving`.

        Args:
            chosen: the device of each rank. Ranks that stay keep theirs.
            transport: the transport between the ranks.
            hosts: the name of the host of each new rank.

        Returns:
            The lines that `regroup` returns.

        Raises:
            ClusterError: a new engine did not come, or the process of a rank ended meanwhile.
            RankError: a rank failed to join again and again.
        """
        assignment = self.assignment
        # All that this changes, to be restored if it fails.
        before = (
            self._chosen,
            self._specs,
            self._transport,
            dict(assignment.engines),
            dict(assignment.processes),
        )
        new = range(len(self), len(chosen))
        arrived = dict(zip(new, self._lifetimes.take_spares(hosts), strict=True))
        new_processes = {engine: assignment.spares[engine] for engine in arrived.values()}
        leaving = {rank: process for rank, process in assignment.processes.items() if rank >= len(chosen)}
        # They are ended by `end_leaving`: until the others have formed their group, nothing is lost.
        assignment.leaving = list(leaving.values())
        try:
            self._lifetimes.assign_spares(arrived)
            self._chosen = tuple(chosen)
            self._transport = transport
            self._specs = self._specs_with_transport(transport)
            for rank in leaving:
                del assignment.engines[rank], assignment.processes[rank]
            for rank in new:
                self._wait_for_output_path(rank, _ENGINE_PATIENCE_S)
            lines = self.regroup(failed=new)
        except BaseException:
            self._chosen, self._specs, self._transport, assignment.engines, assignment.processes = before
            assignment.leaving = []
            assignment.is_whole = False
            self._suspects.difference_update(new)
            self._lifetimes.dismiss(new_processes)
            self._note()
            raise
        return lines

    @uninterrupted()
    def end_leaving(self) -> None:
        """End the processes of ranks that have left the group.

        Raises:
            ClusterError: a process does not end.
        """
        leaving = self.assignment.leaving
        self._lifetimes.end_left(leaving)
        if leaving:
            self.assignment.leaving = []
            self._note()

    def drop(self, ranks: Collection[int]) -> None:
        """Take ranks out whose host is lost. The others are numbered without a gap, in their order, and the
        group has to be formed again.

        Args:
            ranks: those that are lost; some others stay.
        """
        assignment = self.assignment
        staying = [rank for rank in range(len(self)) if rank not in ranks]
        assignment.engines = {new: assignment.engines[rank] for new, rank in enumerate(staying)}
        assignment.processes = {new: assignment.processes[rank] for new, rank in enumerate(staying)}
        assignment.is_whole = False
        self._suspects = {new for new, rank in enumerate(staying) if rank in self._suspects}
        self._chosen = tuple(self._chosen[rank] for rank in staying)
        self._specs = self._specs_with_transport(self._transport)
        self._note()
