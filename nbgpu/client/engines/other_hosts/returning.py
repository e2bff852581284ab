"""Finds hosts that come back after they were lost, and has the launcher start them where it can."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbgpu.client.engines.other_hosts import joining
from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.client.engines.processes import Processes
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.config import ClusterConfig
from nbgpu.errors import NbgpuError
from nbgpu.protocol.hosts import FIRST_NUMBER

if TYPE_CHECKING:
    from nbgpu.client.engines.connection import Client

_log = logging.getLogger("nbgpu.cluster")

_FIRST_PERIOD_S = 2.0
_LONGEST_PERIOD_S = 30.0
"""A host that is not reached is tried again after a while, which doubles up to this."""


class ReturningHosts:
    """Takes hosts that dial in into a cluster that has lost some.

    Args:
        client: ipyparallel's client.
        processes: the cluster's.
        config: the cluster's settings.
        launcher: what has started the hosts.
        join_file: the file with which they dial in.
    """

    def __init__(
        self, client: Client, processes: Processes, config: ClusterConfig, launcher: Launcher, join_file: Path
    ) -> None:
        self._client = client
        self._processes = processes
        self._config = config
        self._launcher = launcher
        self._join_file = join_file
        self._refused: dict[int, str] = {}
        """By the engine of a host that has dialled in, the reason why it gets no ranks."""
        self._closing = threading.Event()
        self._starter: threading.Thread | None = None
        self._obstacle = ""

    def missing(self) -> list[OtherHost]:
        """The hosts that are lost, also those that the cluster goes on without."""
        return [*self._processes.lost_hosts(), *self._without_ranks()]

    def _without_ranks(self) -> list[OtherHost]:
        idle = [host for host in self._processes.without_ranks if not host.is_there]
        return [*self._processes.left, *idle]

    @property
    def has_come(self) -> bool:
        """Whether a host has dialled in since the cluster went on without one."""
        return bool(self._without_ranks()) and bool(self._new_engines())

    def start_again(self) -> None:
        """Have the launcher start lost hosts again, on a thread of its own, until all have come back."""
        if self._launcher.starts_again and (self._starter is None or not self._starter.is_alive()):
            self._starter = threading.Thread(target=self._start_again, name="nbgpu-hosts", daemon=True)
            self._starter.start()

    def _start_again(self) -> None:
        period_s = _FIRST_PERIOD_S
        while self.missing() and not self._closing.is_set():
            try:
                self._obstacle = self._launcher.start_again(self._join_file)
            except NbgpuError as error:
                self._obstacle = str(error)
            except Exception as error:  # noqa: BLE001 - it is logged
                # It is tried again; without this thread the host would never come back.
                _log.exception("a lost host could not be started again")
                self._obstacle = repr(error)
            self._closing.wait(period_s)
            period_s = min(2 * period_s, _LONGEST_PERIOD_S)
        self._obstacle = ""

    def replace_lost(self) -> list[tuple[OtherHost, OtherHost]]:
        """Replace lost hosts by hosts that have dialled in since. Their ranks do not run yet.

        A host replaces the lost one of its own name, if there is one, and must have as many devices. One that
        cannot is refused for good.

        Returns:
            Each lost host, with the one that has its place now.
        """
        replaced = []
        for engine in [] if not self.missing() else self._new_engines():
            if not (missing := self.missing()):
                break
            try:
                description = joining.describe_one(
                    self._client, engine, self._config, self._processes.require_reachable
                )
            except NbgpuError as error:
                self._refused[engine] = str(error)
                continue
            alike = [host for host in missing if host.description.name == description.name]
            lost = (alike or missing)[0]
            before, now = lost.description.devices, description.devices
            if [device["kind"] for device in before] != [device["kind"] for device in now]:
                self._refused[engine] = (
                    f"host {description.name} has {len(now)} rank(s), and host {lost.name} had {len(before)}"
                )
                continue
            name = lost.name if alike else self._free_name(description.name)
            host = lost.make_successor(engine, description, name)
            self._processes.take_back(host, lost)
            replaced.append((lost, host))
        return replaced

    def _new_engines(self) -> list[int]:
        """Return the engines of hosts that have dialled in, and are neither in use nor refused."""
        used = {host.engine for host in (*self._processes.others, *self._processes.without_ranks)}
        here = [number for number in self._client.ids if number >= FIRST_NUMBER]
        return [number for number in here if number not in used and number not in self._refused]

    def _free_name(self, name: str) -> str:
        taken = set(self._processes.hosts)
        names = [name, *(f"{name}-{nth}" for nth in range(2, len(taken) + 3))]
        return next(candidate for candidate in names if candidate not in taken)

    @property
    def is_hopeless(self) -> bool:
        """Whether no lost host can come back."""
        return self._launcher.is_over()

    def obstacles(self) -> Sequence[str]:
        """Sentences that say why a host does not come back; none if no reason is known."""
        refusals = [reason for engine, reason in self._refused.items() if engine in self._client.ids]
        return [*refusals, *filter(None, [self._obstacle, self._launcher.obstacle()])]

    def close(self) -> None:
        """Start no more hosts."""
        self._closing.set()
