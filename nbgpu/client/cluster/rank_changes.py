"""The number of a cluster's ranks changes: by `resize`, by the loss of a host, and when that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbgpu.client.cluster.parts import ClusterParts
from nbgpu.client.engines.other_hosts import joining
from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.client.host import registry
from nbgpu.config import ClusterConfig
from nbgpu.machine import transports
from nbgpu.machine.transports import Transport
from nbgpu.protocol.records import Device


class RankChanges(ClusterParts):
    """What `resize` and `nbgpu.client.faults.lost_hosts` have a cluster do."""

    def take_size(
        self,
        config: ClusterConfig,
        chosen: tuple[Device, ...],
        transport: Transport,
        on: Sequence[str],
    ) -> list[str]:
        """Form the group with the ranks that have these devices, for `resize`; return lines for the person.

        Args:
            config: the settings from now on.
            chosen: the device of each rank. Ranks that stay keep theirs.
            transport: the transport between the ranks.
            on: the name of the host of each new rank.

        Raises:
            ClusterError: another cluster has a GPU, or a rank did not come or ended. The ranks are those from
                before, and the group has to be formed again.
        """
        before = self.config, self.devices, self.chosen_transport
        if self._entry is not None and set(chosen) - set(self.devices):
            registry.claim(self._entry.model_copy(update={"devices": chosen}))
        self.stop_listening()
        self._count_hosts_of_ranks(*on)
        self.config = config
        self.chosen_transport = replace(self.chosen_transport, transport=transport)
        try:
            lines = self.ranks.resize(chosen, transport, on)
        except BaseException:
            self.config, self.devices, self.chosen_transport = before
            self._count_hosts_of_ranks()
            self._note()
            raise
        self._count_hosts_of_ranks()
        self.devices = self._wanted = chosen
        self._reserve()
        self._transports = transports.candidates(config, chosen)
        self._planned, self._last_seen = None, {}
        self.history.keep_only(range(min(len(before[1]), len(chosen))))
        self._note()
        return lines

    def want(self, num_ranks: int) -> None:
        """Note how many ranks the person wants, for a restart and for hosts that come back."""
        if not self.config.is_local:
            self._most_ranks = num_ranks
            self._note()

    def free_seats(self) -> list[tuple[str, Device]]:
        """The devices of the other hosts that have no rank now, each with the name of its host."""
        assert self._processes is not None
        hosts = [*self._processes.others, *self._processes.without_ranks]
        seats = joining.devices_of([host for host in hosts if host.is_there])
        for rank, process in self.ranks.seating.processes.items():
            if (taken := (process.host, self.devices[rank])) in seats:
                seats.remove(taken)
        return seats

    def missing_hosts(self) -> list[str]:
        """The names of the hosts that are lost, also of those that the cluster goes on without."""
        return [] if self._returning is None else [host.name for host in self._returning.missing()]

    def _count_hosts_of_ranks(self, *more: str) -> None:
        """Count the hosts of the ranks, and more with these names, among those that have ranks."""
        assert self._processes is not None
        of_ranks = {process.host for process in self.ranks.seating.processes.values()}
        self._processes.have_ranks_on({*of_ranks, *more})

    def when_host_is_lost(self) -> str:
        """What the person can do, in whole sentences without the last full stop."""
        return "" if self._processes is None else self._processes.when_lost

    def go_on_without(self, lost: Sequence[OtherHost]) -> None:
        """Take the ranks of lost hosts out, and number the others without a gap. The group has to be formed
        again."""
        assert self._processes is not None
        names = {host.name for host in lost}
        gone = [rank for rank, each in self.ranks.seating.processes.items() if each.host in names]
        numbers = {rank: new for new, rank in enumerate(r for r in range(self.world_size) if r not in gone)}
        self._processes.go_on_without(lost)
        self.devices = self._wanted = tuple(self.devices[rank] for rank in numbers)
        self._transports = transports.candidates(self.config, self.devices)
        self._planned, self._last_seen = None, {}
        self.history.renumber(numbers)
        self.recovery.renumber(numbers)
        self.stop_listening()
        self.ranks.drop(gone)

    def start_lost_hosts(self) -> None:
        """Have lost hosts started again in the background, where that can be done."""
        if self._returning is not None:
            self._returning.start_again()

    def take_returned_hosts(self) -> Sequence[tuple[OtherHost, OtherHost]]:
        """Give the places of lost hosts to hosts that have dialled in; return each lost one with the one that
        has its place now."""
        if self._returning is None:
            return []
        # The questions of a host come from what it was when it was last listened to.
        if came := self._returning.take():
            self.stop_listening()
        return came

    def hosts_cannot_return(self) -> bool:
        """Whether no lost host can come back, and the others end too, as at the end of a job."""
        return self._returning is not None and self._returning.are_hopeless

    def obstacles_to_return(self) -> Sequence[str]:
        """Sentences that say why hosts do not come back."""
        return [] if self._returning is None else self._returning.obstacles()

    def grow_onto(self, hosts: Sequence[OtherHost]) -> list[str]:
        """Start ranks on hosts that have come back, as the last ones of the group, as far as more ranks are
        wanted; return what `resize` returns."""
        assert self._processes is not None
        names = [host.name for host in hosts]
        new = [seat for seat in self.free_seats() if seat[0] in names]
        if self._most_ranks is not None:
            new = new[: max(0, self._most_ranks - self.world_size)]
        if not new:
            self._count_hosts_of_ranks()
            self._note()
            return []
        chosen = (*self.devices, *(device for _, device in new))
        try:
            return self.take_size(self.config, chosen, self.transport, [name for name, _ in new])
        except BaseException:
            # They are tried once more before the next cell.
            self._processes.go_on_without(hosts)
            raise
