"""The number of a cluster's ranks changes: by `resize`, by the loss of a host, and when that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbgpu.client.engines.other_hosts import joining
from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.client.host import registry
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import ClusterConfig
from nbgpu.machine.transports import Transport
from nbgpu.protocol.records import Device


class RankChanges:
    """What `resize` and `nbgpu.client.faults.lost_hosts` have a cluster do."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

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
        state = self._state
        before = state.config, state.devices, state.chosen_transport
        if state.entry is not None and set(chosen) - set(state.devices):
            registry.claim(state.entry.model_copy(update={"devices": chosen}))
        state.stop_listening()
        self._count_hosts_of_ranks(*on)
        state.config = config
        state.chosen_transport = replace(state.chosen_transport, transport=transport)
        try:
            lines = state.ranks.resize(chosen, transport, on)
        except BaseException:
            state.config, state.devices, state.chosen_transport = before
            self._count_hosts_of_ranks()
            state.note()
            raise
        self._count_hosts_of_ranks()
        state.use_devices(chosen)
        state.reserve()
        state.last_seen = {}
        state.history.keep_only(range(min(len(before[1]), len(chosen))))
        state.note()
        return lines

    def want(self, num_ranks: int) -> None:
        """Note how many ranks the person wants, for a restart and for hosts that come back."""
        if not self._state.config.is_local:
            self._state.most_ranks = num_ranks
            self._state.note()

    def free_seats(self) -> list[tuple[str, Device]]:
        """The devices of the other hosts that have no rank now, each with the name of its host."""
        state = self._state
        assert state.processes is not None
        hosts = [*state.processes.others, *state.processes.without_ranks]
        seats = joining.devices_of([host for host in hosts if host.is_there])
        for rank, process in state.ranks.seating.processes.items():
            if (taken := (process.host, state.devices[rank])) in seats:
                seats.remove(taken)
        return seats

    def _count_hosts_of_ranks(self, *more: str) -> None:
        """Count the hosts of the ranks, and more with these names, among those that have ranks."""
        assert self._state.processes is not None
        of_ranks = {process.host for process in self._state.ranks.seating.processes.values()}
        self._state.processes.have_ranks_on({*of_ranks, *more})

    def when_host_is_lost(self) -> str:
        """What the person can do, in whole sentences without the last full stop."""
        return "" if self._state.processes is None else self._state.processes.when_lost

    def go_on_without(self, lost: Sequence[OtherHost]) -> dict[int, int]:
        """Take the ranks of lost hosts out, and number the others without a gap; return their new numbers by
        those from before. The group has to be formed again."""
        state = self._state
        assert state.processes is not None
        names = {host.name for host in lost}
        gone = [rank for rank, each in state.ranks.seating.processes.items() if each.host in names]
        numbers = {rank: new for new, rank in enumerate(r for r in range(state.world_size) if r not in gone)}
        state.processes.go_on_without(lost)
        state.use_devices(tuple(state.devices[rank] for rank in numbers))
        state.last_seen = {}
        state.history.renumber(numbers)
        state.stop_listening()
        state.ranks.drop(gone)
        return numbers

    def start_lost_hosts(self) -> None:
        """Have lost hosts started again in the background, where that can be done."""
        if self._state.returning is not None:
            self._state.returning.start_again()

    def take_returned_hosts(self) -> Sequence[tuple[OtherHost, OtherHost]]:
        """Give the places of lost hosts to hosts that have dialled in; return each lost one with the one that
        has its place now."""
        if self._state.returning is None:
            return []
        # The questions of a host come from what it was when it was last listened to.
        if came := self._state.returning.take():
            self._state.stop_listening()
        return came

    def hosts_cannot_return(self) -> bool:
        """Whether no lost host can come back, and the others end too, as at the end of a job."""
        return self._state.returning is not None and self._state.returning.are_hopeless

    def obstacles_to_return(self) -> Sequence[str]:
        """Sentences that say why hosts do not come back."""
        return [] if self._state.returning is None else self._state.returning.obstacles()

    def grow_onto(self, hosts: Sequence[OtherHost]) -> list[str]:
        """Start ranks on hosts that have come back, as the last ones of the group, as far as more ranks are
        wanted; return what `resize` returns."""
        state = self._state
        assert state.processes is not None
        names = [host.name for host in hosts]
        new = [seat for seat in self.free_seats() if seat[0] in names]
        if state.most_ranks is not None:
            new = new[: max(0, state.most_ranks - state.world_size)]
        if not new:
            self._count_hosts_of_ranks()
            state.note()
            return []
        chosen = (*state.devices, *(device for _, device in new))
        try:
            return self.take_size(state.config, chosen, state.transport, [name for name, _ in new])
        except BaseException:
            # They are tried once more before the next cell.
            state.processes.go_on_without(hosts)
            raise
