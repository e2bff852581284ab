"""The state that the parts of a cluster share: its settings, devices, engines and hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbgpu.client.engines.host_pool import NOT_RUNNING, HostPool
from nbgpu.client.engines.other_hosts.served import Served
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.stacks import StackSample, StackSampler
from nbgpu.client.host import gpu_choice, registry
from nbgpu.client.state.history import CellHistory
from nbgpu.client.state.release import IdleRelease, TimeLimitWatch
from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError, NoClusterError
from nbgpu.host.host import Questions
from nbgpu.machine import transports
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.machine.gpus.reservations import Reservations
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.performance.timeline import Timeline
from nbgpu.planning.host_devices import UNKNOWN
from nbgpu.protocol.records import Device
from nbgpu.text.ranks import count_of_ranks

_ANSWER_PATIENCE_S = 1.0


@dataclass
class ClusterState:
    """The state of a cluster. All parts of the cluster hold the same object."""

    config: ClusterConfig
    pool: HostPool
    """The hosts of the ranks. Each start makes a new pool."""
    devices: tuple[Device, ...]
    """The device of each rank."""
    chosen_transport: ChosenTransport
    """The transport, with those that were tried before it; before the start, the first one to try."""
    last_timeline: Timeline | None = None
    """The timeline of the latest cell with `%%distributed --timeline`."""
    run_folder: Path | None = None
    """The folder of the latest training run."""
    history: CellHistory = field(default_factory=CellHistory)
    """The cells and values that were sent to the ranks."""
    news: list[str] = field(default_factory=list)
    """News for the next cell to show, such as ranks that were replaced in a run."""
    time_limit: TimeLimitWatch | None = None
    entry: registry.Entry | None = None
    reservations: Reservations = field(default_factory=Reservations)
    """Shows other users of this host which GPUs the cluster has."""
    started_ranks: Ranks | None = None
    """The ranks; None while the cluster is not running."""
    last_seen: dict[int, StackSample] = field(default_factory=dict)
    """By rank: its newest answer in the present cell about what it is doing."""
    release: IdleRelease | None = None
    why_ended: str = ""
    """The reason why the cluster no longer runs, if nobody has stopped it; otherwise empty."""
    wanted: tuple[Device, ...] = field(init=False)
    """The devices that the next start asks for."""
    transports: Sequence[Transport] = field(init=False)
    """The transports that are tried, the best one first."""
    listening: list[Questions] = field(init=False, default_factory=list)
    """The hosts' questions; empty while nobody takes them."""

    def __post_init__(self) -> None:
        self.use_devices(self.devices)

    def use_devices(self, chosen: tuple[Device, ...]) -> None:
        """Set the devices of the ranks from now on, and the transports that are possible between them."""
        self.devices = self.wanted = chosen
        self.transports = transports.candidates(self.config, chosen or UNKNOWN)

    def choose_first_transport(self) -> None:
        """Choose the best transport as the first one to try."""
        self.chosen_transport = ChosenTransport(self.transports[0], simulated=self.config.simulated)

    @property
    def running(self) -> bool:
        return self.pool.client is not None

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def backend(self) -> str:
        """The backend of torch.distributed."""
        return self.chosen_transport.transport.backend

    @property
    def transport(self) -> Transport:
        """The transport over which the ranks communicate."""
        return self.chosen_transport.transport

    @property
    def ranks(self) -> Ranks:
        """The engines as ranks; NoClusterError if the cluster is not running."""
        if self.started_ranks is None:
            raise NoClusterError(self.why_ended or NOT_RUNNING)
        return self.started_ranks

    @property
    def time_left_s(self) -> float | None:
        """The time until the hosts are taken away, such as at a Slurm job's time limit, in seconds; None if
        there is no limit or it is not known."""
        return None if self.time_limit is None else self.time_limit.left_s

    @property
    def folder(self) -> Path:
        """The cluster's folder, which only the user can enter and which is removed when the cluster ends."""
        return self.pool.processes.folder

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients. Another process needs it to reach the engines."""
        return self.pool.processes.connection_file

    def describe(self) -> str:
        """Describe the cluster's ranks, devices and transport in one line."""
        if not self.devices and self.config.is_local:
            return f"GPUs that are waited for (gpus={self.config.gpus!r})"
        if not self.devices:
            return f"{self.config.num_hosts} host(s) that have not dialled in yet"
        count = count_of_ranks(self.world_size)
        if not self.config.is_local:
            num_hosts = len(self.pool.with_ranks) or self.config.num_hosts
            count += f" on {num_hosts} host{'s' if num_hosts > 1 else ''}"
        if self.devices[0].kind == "cpu":
            reason = (
                "no GPU found" if self.config.gpus in (gpus_setting.AUTO, gpus_setting.ALL) else "no GPU used"
            )
            return f"{reason}: {count.replace(' ', ' CPU ', 1)}, {self.chosen_transport.describe()}"
        names = ", ".join(f"{d.label()} ({d.uuid})" for d in dict.fromkeys(self.devices))
        return f"{count} on {names}, {self.chosen_transport.describe()}"

    def stack_sampler(self, last_seen: dict[int, StackSample] | None = None) -> StackSampler:
        """Make a sampler, which asks the ranks what they are doing. The caller closes it.

        Args:
            last_seen: a dict for the answers of the ranks; None for that of the present cell, which tells
                what a rank did that no longer answers.
        """
        hosts = self.pool.hosts
        kept = self.last_seen if last_seen is None else last_seen
        return StackSampler(self.ranks.assignment.processes, lambda host: hosts[host].stacks(), kept)

    def idle_ranks(self) -> list[int]:
        """Return the ranks that answer that they are idle."""
        with closing(self.stack_sampler({})) as sampler:
            sampler.ask()
            sampler.collect(_ANSWER_PATIENCE_S)
            return [rank for rank, seen in sampler.seen.items() if seen.where.doing == "idle"]

    def listen(self) -> list[Questions]:
        """Begin to receive the questions that ranks ask by `input()`; return the receiver of each host."""
        if not self.listening:
            self.listening = [host.questions() for host in self.pool.rank_hosts]
        return self.listening

    def stop_listening(self) -> None:
        """Receive no more questions until the next `listen`."""
        while self.listening:
            self.listening.pop().close()

    def note_use(self) -> None:
        """Record that the cluster is used, so that `release_after_s` counts from now."""
        if self.release is not None:
            self.release.used()

    def write_entry(self) -> None:
        """Write the cluster's entry in the registry, by which other processes list it, end it or take it
        over.

        Call it after each change of the state that the entry describes.
        """
        if self.entry is None:
            return
        fields: dict[str, Any] = {
            # The folder may have changed: preloaded processes have been started in another one.
            "folder": self.pool.processes.folder,
            "leaders": self.pool.processes.leaders,
            "chosen_transport": self.chosen_transport,
            "devices": self.devices,
            "job": self.pool.launcher.job,
            "launched": self.pool.launcher.record(),
            "hosts": tuple(host.joined for host in self.pool.members),
            "most_ranks": self.pool.most_ranks,
        }
        if self.started_ranks is not None:
            assignment = self.started_ranks.assignment
            fields |= {
                "config": self.config,
                "devices": self.started_ranks.devices,
                "assignment": assignment,
                "engines": self.entry.engines_with(self.started_ranks.pids_here),
            }
        if self.run_folder is not None:
            fields["run"] = self.run_folder
        self.entry = self.entry.model_copy(update=fields)
        registry.update(self.entry)

    def reserve(self) -> None:
        """Show other users of this host which GPUs the cluster has here."""
        if self.config.is_local:
            self.reservations.hold(gpu_choice.gpus_of(self.devices))

    def serve(self, folder: Path, marker: Path | None = None, in_parent: bool = False) -> Served:
        """Make the object that serves a folder of this host to those hosts that do not share it.

        Args:
            folder: the folder, which is made if it is missing.
            marker: a text file in the folder. A host that reads the same text there shares the folder.
                Without a marker one is written.
            in_parent: whether to test the parent folder, because `folder` is not made yet.

        Raises:
            ConfigError: the folder cannot be written to.
            ClusterError: a host is lost.
        """
        folder = folder.absolute()
        return Served(folder, self.pool.hosts_not_seeing(folder.parent if in_parent else folder, marker))

    def tell_news(self) -> None:
        """Print the news and remove them."""
        while self.news:
            print(self.news.pop(0), file=sys.stderr)  # noqa: T201 - the cell's output

    def checked_ranks(self, ranks: Sequence[int] | None) -> list[int]:
        """Return the ranks that a call names, or all if it names none.

        Raises:
            ConfigError: there is no rank with such a number.
            ClusterError: the ranks cannot be reached.
        """
        self.note_use()
        self.ranks.require_reachable()
        if ranks is None:
            return list(range(self.world_size))
        wrong = [r for r in ranks if not 0 <= r < self.world_size]
        if wrong or not ranks:
            raise ConfigError(f"ranks = {list(ranks)} is not valid. Ranks: 0 to {self.world_size - 1}")
        return sorted(set(ranks))
