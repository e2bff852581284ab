"""Changes the number of a cluster's ranks: for `resize`, for the loss of a host, and for its return."""

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
    """Changes the number of ranks, for `resize` and for lost and returned hosts."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def change_size(
        self,
        config: ClusterConfig,
        chosen: tuple[Device, ...],
        transport: Transport,
        on: Sequence[str],
    ) -> list[str]:
        """Form the group again with another number of ranks; return lines for the person.

        Args:
            config: the new settings.
            chosen: the device of each rank. Ranks that stay keep theirs.
            transport: the transport between the ranks.
            on: the name of the host of each new rank.

        Raises:
            ClusterError: another cluster has a GPU, or a rank has not started or has ended. The cluster has
                its earlier ranks, and the group has to be formed again.
        """
        state = self._state
        before = state.config, state.devices, state.chosen_transport
        if state.entry is not None and set(chosen) - set(state.devices):
            registry.claim(state.entry.model_copy(update={"devices": chosen}))
        try:
            state.stop_listening()
            self._mark_hosts_with_ranks(*on)
            state.config = config
            state.chosen_transport = replace(state.chosen_transport, transport=transport)
            lines = state.ranks.resize(chosen, transport, on)
        except BaseException:
            state.config, state.devices, state.chosen_transport = before
            self._mark_hosts_with_ranks()
            state.write_entry()
            raise
        self._mark_hosts_with_ranks()
        state.use_devices(chosen)
        state.reserve()
        state.last_seen = {}
        state.history.keep_only(range(min(len(before[1]), len(chosen))))
        state.write_entry()
        return lines

    def note_wanted_ranks(self, num_ranks: int) -> None:
        """Record the number of ranks that the person wants on other hosts. A restart, and hosts that come
        back, aim at it."""
        if not self._state.config.is_local:
            self._state.pool.most_ranks = num_ranks
            self._state.write_entry()

    def free_slots(self) -> list[tuple[str, Device]]:
        """Return (name of the host, device) for each device of the other hosts that has no rank."""
        state = self._state
        slots = joining.devices_of([host for host in state.pool.members if host.is_there])
        for rank, process in state.ranks.assignment.processes.items():
            if (slot := (process.host, state.devices[rank])) in slots:
                slots.remove(slot)
        return slots

    def _mark_hosts_with_ranks(self, *more: str) -> None:
        """Mark the hosts of the present ranks, and those named in `more`, as hosts with ranks, and all others
        as hosts without."""
        names = {process.host for process in self._state.ranks.assignment.processes.values()}
        self._state.pool.mark_with_ranks({*names, *more})

    def go_on_without(self, lost: Sequence[OtherHost]) -> dict[int, int]:
        """Remove lost hosts and their ranks, and number the other ranks without a gap.

        The group has to be formed again afterwards.

        Returns:
            The new numbers of the ranks that stay, by their old numbers.
        """
        state = self._state
        names = {host.name for host in lost}
        processes = state.ranks.assignment.processes
        gone = [rank for rank, process in processes.items() if process.host in names]
        numbers = {rank: new for new, rank in enumerate(r for r in range(state.world_size) if r not in gone)}
        state.pool.go_on_without(lost)
        state.use_devices(tuple(state.devices[rank] for rank in numbers))
        state.last_seen = {}
        state.history.renumber(numbers)
        state.stop_listening()
        state.ranks.drop(gone)
        return numbers

    def take_returned_hosts(self) -> Sequence[tuple[OtherHost, OtherHost]]:
        """Replace lost hosts by hosts that have dialled in since. Return (lost host, replacement) of each."""
        # The receivers of ranks' `input()` questions belong to the lost hosts.
        if replaced := self._state.pool.replace_lost():
            self._state.stop_listening()
        return replaced

    def grow_onto(self, hosts: Sequence[OtherHost]) -> list[str]:
        """Start ranks on hosts that have come back, with the highest numbers, until the cluster has as many
        ranks as the person wants. Return the lines of `change_size`."""
        state = self._state
        names = [host.name for host in hosts]
        new = [slot for slot in self.free_slots() if slot[0] in names]
        if state.pool.most_ranks is not None:
            new = new[: max(0, state.pool.most_ranks - state.world_size)]
        if not new:
            self._mark_hosts_with_ranks()
            state.write_entry()
            return []
        chosen = (*state.devices, *(device for _, device in new))
        try:
            return self.change_size(state.config, chosen, state.transport, [name for name, _ in new])
        except BaseException:
            # The hosts are lost again, so that they are tried once more before the next cell.
            state.pool.go_on_without(hosts)
            raise
