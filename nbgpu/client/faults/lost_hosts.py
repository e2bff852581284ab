"""Decides how a cluster goes on when it has lost a host, by its setting `on_host_lost`.

A host whose heartbeat is missing for 10 s counts as lost. Such a host ends its own ranks after 6 s, so that
none of them still computes when the others form the next generation of the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.client.ipykernel.notice import Notice
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.rank_changes import RankChanges
from nbgpu.errors import ClusterError
from nbgpu.machine.signals import take_interrupt
from nbgpu.text.ranks import count_of_ranks, named_ranges, named_ranks

_LOOK_PERIOD_S = 0.1


@dataclass(frozen=True)
class Waiting:
    """How to wait for a host.

    Attributes:
        goes_on: returns whether to continue to wait.
        show: shows the person which host is waited for; it is called with an empty text at the end.
    """

    goes_on: Callable[[], bool]
    show: Callable[[str], None]


class HostsGivenUpError(ClusterError):
    """A host is lost, and the cluster cannot go on without it, or must not by `on_host_lost`."""


class LostHosts:
    """Goes on without lost hosts, or waits for them.

    Args:
        state: the state of the cluster.
        changes: removes hosts with their ranks from the cluster, and adds them again.
        renumber: is called with the new numbers of the remaining ranks, by their former numbers.
    """

    def __init__(
        self, state: ClusterState, changes: RankChanges, renumber: Callable[[Mapping[int, int]], None]
    ) -> None:
        self._state = state
        self._changes = changes
        self._renumber = renumber
        self.places: dict[int, str] = {}
        """The hosts on which ranks get new engines, by rank, if their former host is replaced by another."""

    def what_the_next_cell_does(self) -> str:
        """Return a message about the host that the next cell waits for; empty if it waits for none."""
        lost = self._state.pool.lost()
        if not lost or self._state.config.on_host_lost != "wait":
            return ""
        self._state.pool.start_again()
        patience_s = self._state.config.host_patience_s
        return (
            f"{_named(lost)} lost: the next cell waits for up to {patience_s:g} s until it is back (on_host_lost='wait'). "
            f"{self._kept(lost, ' %pull still gets them.')}"
        )

    def go_on(self, waiting: Waiting | None = None) -> list[str]:
        """If hosts are lost, wait for them or go on without them, by `on_host_lost`. Return lines that tell
        the person what happened.

        Args:
            waiting: how to wait for a host; None shows a notice under the cell, and waits until a stop.

        Raises:
            HostsGivenUpError: the cluster does not go on.
        """
        lost = self._state.pool.lost()
        if not lost:
            return []
        policy, launcher = self._state.config.on_host_lost, self._state.pool.launcher
        self._state.pool.start_again()
        if policy == "wait":
            return self._wait(waiting or Waiting(lambda: True, Notice().show))
        ranks = self.ranks_on(lost)
        if policy == "stop":
            raise HostsGivenUpError(
                f"{_named(lost)} lost, and the cluster runs no more cells (on_host_lost='stop'). "
                f"{self._kept(lost, ' %pull still gets them.')} {launcher.when_lost()}"
            )
        if launcher.is_over():
            raise HostsGivenUpError(f"{_named(lost)} lost. {launcher.when_lost()}")
        if len(ranks) == len(self._state.ranks):
            raise HostsGivenUpError(
                f"{_named(lost)} lost, and no other host has ranks. {launcher.when_lost()}"
            )
        message = self._describe_shrinking(lost, ranks)
        self.places = {}
        self._renumber(self._changes.go_on_without(lost))
        return [message]

    def ranks_on(self, hosts: Sequence[OtherHost]) -> list[int]:
        """Return the ranks that these hosts have, or will have by `places`."""
        names = {host.name for host in hosts}
        # A copy: another thread may replace ranks meanwhile.
        processes = dict(self._state.ranks.assignment.processes)
        return [rank for rank, process in processes.items() if self.places.get(rank, process.host) in names]

    def _kept(self, lost: Sequence[OtherHost], advice: str = "") -> str:
        """Return a sentence about the ranks that have kept their variables, followed by the advice if there
        are such ranks."""
        gone = {*self.ranks_on(lost), *self._state.ranks.gone()}
        kept = [rank for rank in range(len(self._state.ranks)) if rank not in gone]
        if not kept:
            return "No rank kept its variables."
        return f"{named_ranges(kept).capitalize()} kept all variables.{advice}"

    def _describe_shrinking(self, lost: Sequence[OtherHost], gone: Sequence[int]) -> str:
        """Return a message about the ranks that remain without the lost hosts, and their new numbers."""
        remaining = [rank for rank in range(len(self._state.ranks)) if rank not in gone]
        count = count_of_ranks(len(remaining))
        message = f"{_named(lost)} lost, and the cluster goes on with {count}. {self._kept(lost)}"
        moved = [f"{rank} is {new}" for new, rank in enumerate(remaining) if rank != new]
        if moved:
            message += f" They have other numbers now: {', '.join(moved)}."
        return f"{message} When a host comes back, the cluster takes it before the next cell"

    def _wait(self, waiting: Waiting) -> list[str]:
        """Wait until each lost host is back or replaced by another; return a line for each. Note in `places`
        which hosts have come for others.

        Raises:
            HostsGivenUpError: a host cannot come back, did not come back in time, or is no longer waited for.
        """
        patience_s, launcher = self._state.config.host_patience_s, self._state.pool.launcher
        give_up_mono_s = time.monotonic() + patience_s
        lines = []
        try:
            while still_lost := self._state.pool.lost():
                # One that came for another may be lost itself before it has ranks, or be a spare host for
                # one that had none.
                for before, now in self._changes.take_returned_hosts():
                    self.places |= dict.fromkeys(self.ranks_on([before]), now.name)
                    lines.append(f"{_came(before, now)}.")
                take_interrupt()
                obstacles = "; ".join(self._state.pool.obstacles())
                names = " and ".join(f"host {host.name}" for host in still_lost)
                are = "are" if len(still_lost) > 1 else "is"
                if launcher.is_over():
                    raise HostsGivenUpError(
                        f"{names} cannot come back. {self._kept(still_lost)} {launcher.when_lost()}"
                    )
                if not waiting.goes_on() or time.monotonic() > give_up_mono_s:
                    outcome = (
                        f"did not come back within {patience_s:g} s (host_patience_s)"
                        if waiting.goes_on()
                        else f"{are} not waited for any more"
                    )
                    reason = f"{obstacles}. " if obstacles else ""
                    raise HostsGivenUpError(
                        f"{names} {outcome}. {reason}{self._kept(still_lost)} The next cell waits once more. "
                        f"{launcher.when_lost()}"
                    )
                text = f"waiting for {names}, which {are} lost; Stop ends the wait"
                waiting.show(f"{text}. {obstacles}" if obstacles else text)
                time.sleep(_LOOK_PERIOD_S)
        finally:
            waiting.show("")
        return lines

    def readmit_hosts(self) -> str:
        """Start ranks on hosts that have come back after the cluster went on without them.

        Returns:
            A message; empty if no host has come back, or no more ranks are wanted.

        Raises:
            ClusterError: a rank did not come. The cluster is as before.
        """
        came = self._changes.take_returned_hosts()
        if not came:
            return ""
        before = len(self._state.ranks)
        lines = self._changes.grow_onto([host for _, host in came])
        new = range(before, len(self._state.ranks))
        if not new:
            return ""
        arrivals = "; ".join(_came(lost, host) for lost, host in came)
        return "\n".join(
            [
                f"{arrivals[0].upper()}{arrivals[1:]}: {named_ranks(new)} {'are' if len(new) > 1 else 'is'} new and empty, and "
                f"there are {count_of_ranks(len(self._state.ranks))}. {named_ranges(range(before)).capitalize()} kept all variables.",
                *lines,
            ]
        )


def _named(lost: Sequence[OtherHost]) -> str:
    """'host n2 is', or 'hosts n2 and n3 are'."""
    names = " and ".join(host.name for host in lost)
    return f"hosts {names} are" if len(lost) > 1 else f"host {names} is"


def _came(lost: OtherHost, host: OtherHost) -> str:
    return (
        f"host {host.name} is back"
        if lost.name == host.name
        else f"host {host.name} came for host {lost.name}"
    )
