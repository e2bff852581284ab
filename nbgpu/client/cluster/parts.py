"""The parts of a cluster, and what all calls of a cluster do before they send work."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from nbgpu.client.cluster.history import CellHistory
from nbgpu.client.cluster.questions import Questions
from nbgpu.client.cluster.release import IdleRelease
from nbgpu.client.cluster.time_limit_watch import TimeLimitWatch
from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.client.engines.other_hosts.returning import ReturningHosts
from nbgpu.client.engines.other_hosts.served import Served
from nbgpu.client.engines.processes import Processes
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.stacks import Lookout, Sighting
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.host import gpu_choice, registry
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.runs import planning
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.run import Run
from nbgpu.client.variables.autoreload import Reloading
from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError, NoClusterError, RunError
from nbgpu.host.host import Questions as QuestionsOfHost
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.machine.gpus.reservations import Reservations
from nbgpu.machine.signals import uninterrupted
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.performance.timeline import Timeline
from nbgpu.protocol.records import Device
from nbgpu.text.ranks import count_of_ranks

_ANSWER_PATIENCE_S = 1.0
_NOT_RUNNING = "this cluster is not running. Start it with: start(), or %nbgpu start"


class ClusterParts:
    """What a cluster consists of, for its calls. `Cluster` fills the parts when it is made and started."""

    config: ClusterConfig
    devices: tuple[Device, ...]
    """The device of each rank."""
    chosen_transport: ChosenTransport
    """The transport, with those that were tried before it; before the start, the first to be tried."""
    run: Run | None
    """The latest training run, which may be over."""
    last_timeline: Timeline | None
    """What the ranks did in the latest cell with `%%distributed --timeline`."""
    history: CellHistory
    """The cells and values that were sent to the ranks."""
    reloading: Reloading
    recovery: Recovery
    news: list[str]
    """News for the next cell to show, such as ranks that were replaced in a run."""
    join_file: Path | None
    """The file with which hosts dial in, where ranks are on other hosts."""

    _chosen_mono_s: float
    """When the devices were chosen, where that depends on who has them."""
    _most_ranks: int | None
    """How many ranks the person wants on other hosts at most, by `resize`; None for one on each device."""
    _launcher: Launcher | None
    """What has started the hosts; None where ranks are on this one."""
    _returning: ReturningHosts | None
    """Finds hosts that come back; None where ranks are on this host."""
    _time_limit: TimeLimitWatch | None
    _processes: Processes | None
    _entry: registry.Entry | None
    _reservations: Reservations
    """Says to other users of this host which GPUs the cluster has."""
    _client: Any
    """ipyparallel's client; None while the cluster is not running."""
    _ranks: Ranks | None
    _choices: planning.Choices
    _planned: Plan | None
    """The latest plan."""
    _last_seen: dict[int, Sighting]
    _listens: list[QuestionsOfHost]
    """The hosts' questions; empty while nobody takes them."""
    _release: IdleRelease | None
    _why_ended: str
    """The reason why the cluster no longer runs, if nobody has stopped it; otherwise empty."""

    @property
    def running(self) -> bool:
        return self._client is not None

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
    def pids(self) -> dict[int, int]:
        """The process ids by rank."""
        return self.ranks.pids

    @property
    def ranks(self) -> Ranks:
        """The engines as ranks; NoClusterError if the cluster is not running."""
        if self._ranks is None:
            raise NoClusterError(self._why_ended or _NOT_RUNNING)
        return self._ranks

    @property
    def time_left_s(self) -> float | None:
        """The time until the hosts are taken away, as by a Slurm job's time limit; None where there is no
        limit or nobody knows."""
        return None if self._time_limit is None else self._time_limit.left_s

    @property
    def folder(self) -> Path:
        """The cluster's folder, which only the user can enter and which is removed when the cluster ends."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return self._processes.folder

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients. Another process needs it to reach the engines."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return self._processes.connection_file

    def describe(self) -> str:
        """Describe the cluster's ranks, devices and transport in one line."""
        if not self.devices and self.config.is_local:
            return f"GPUs that are waited for (gpus={self.config.gpus!r})"
        if not self.devices:
            return f"{self.config.num_hosts} host(s) that have not dialled in yet"
        count = count_of_ranks(self.world_size)
        if not self.config.is_local:
            num_hosts = len(self._processes.others) if self._processes is not None else self.config.num_hosts
            count += f" on {num_hosts} host{'s' if num_hosts > 1 else ''}"
        if self.devices[0].kind == "cpu":
            found = (
                "no GPU found" if self.config.gpus in (gpus_setting.AUTO, gpus_setting.ALL) else "no GPU used"
            )
            return f"{found}: {count.replace(' ', ' CPU ', 1)}, {self.chosen_transport.describe()}"
        names = ", ".join(f"{d.label()} ({d.uuid})" for d in dict.fromkeys(self.devices))
        return f"{count} on {names}, {self.chosen_transport.describe()}"

    def lost_hosts(self) -> Sequence[OtherHost]:
        """The hosts that have ranks and are not heard any more."""
        return [] if self._processes is None else self._processes.lost_hosts()

    def hosts_dialled_in(self) -> bool:
        """Whether a host has dialled in that would get ranks in the place of one that the cluster goes on
        without."""
        has_room = self._most_ranks is None or self.world_size < self._most_ranks
        return has_room and self._returning is not None and self._returning.has_come

    def lookout(self) -> Lookout:
        """Make a lookout, which asks the ranks where they are. The caller closes it."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        hosts = self._processes.hosts
        return Lookout(self.ranks.seating.processes, lambda host: hosts[host].stacks(), self._last_seen)

    def idle_ranks(self) -> list[int]:
        """Return the ranks that answer that they are at work on nothing."""
        with closing(self.lookout()) as lookout:
            lookout.seen.clear()
            lookout.ask()
            lookout.collect(_ANSWER_PATIENCE_S)
            return [rank for rank, seen in lookout.seen.items() if seen.where.doing == "idle"]

    def questions(self) -> Questions:
        """Make the object that takes the ranks' questions to the person. The caller closes it."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return Questions(self._listen)

    def _listen(self) -> list[QuestionsOfHost]:
        """Take the questions of the ranks from now on."""
        assert self._processes is not None
        if not self._listens:
            self._listens = [host.questions() for host in self._processes.with_ranks]
        return self._listens

    def stop_listening(self) -> None:
        """Take no more questions of the ranks to the person, until somebody asks for them again."""
        while self._listens:
            self._listens.pop().close()

    def restore_group(
        self, watch: RankWatch, results: Mapping[int, Reply], failed: Sequence[int] = ()
    ) -> list[str]:
        """Restore the group when all ranks are back or gone, and replace those that are gone.

        Args:
            watch: the watch over the results.
            results: the results by rank.
            failed: the ranks that raised, whose state does not count where the ranks differ.

        Returns:
            Lines for the person.
        """
        return self.recovery.restore_group(watch, results, failed)

    def leave_behind(self, results: Mapping[int, Reply]) -> None:
        """Note the ranks that did not come back from a cell. Until they do they get no other cell, and no
        answers to their questions."""
        self.recovery.leave_behind(results)

    def note_use(self) -> None:
        """Note that somebody uses the cluster, so that `release_after_s` counts from now."""
        if self._release is not None:
            self._release.used()

    def _note(self) -> None:
        """Write the entry that other processes need to list, end or take over this cluster."""
        if self._entry is None or self._processes is None:
            return
        known: dict[str, Any] = {
            # Preloaded processes have a folder of their own.
            "folder": self._processes.folder,
            "leaders": self._processes.leaders,
            "chosen_transport": self.chosen_transport,
            "devices": self.devices,
            "job": "" if self._launcher is None else self._launcher.job,
            "launched": {} if self._launcher is None else self._launcher.record(),
            "hosts": tuple(host.joined for host in (*self._processes.others, *self._processes.without_ranks)),
            "most_ranks": self._most_ranks,
        }
        if self._ranks is not None:
            seating = self._ranks.seating
            known |= {
                "config": self.config,
                "devices": self._ranks.devices,
                "seating": seating,
                "engines": self._entry.engines_with(self._ranks.pids_here),
            }
        if self.run is not None:
            known["run"] = self.run.folder
        self._entry = self._entry.model_copy(update=known)
        registry.update(self._entry)

    def _reserve(self) -> None:
        """Say to other users of this host which GPUs the cluster has, where it has them here."""
        if self.config.is_local:
            self._reservations.hold(gpu_choice.gpus_of(self.devices))

    @property
    def other_hosts(self) -> Sequence[OtherHost]:
        """The hosts of the ranks where these are not on this one."""
        return [] if self._processes is None else self._processes.others

    @property
    def hosts_without_ranks(self) -> Sequence[OtherHost]:
        """Hosts of the cluster that have no ranks since a `resize`."""
        return [] if self._processes is None else self._processes.without_ranks

    def serve(self, folder: Path, known: Path | None = None, in_parent: bool = False) -> Served:
        """Make the object that serves a folder of this host for the hosts of the ranks that do not see it.

        Args:
            folder: the folder, which is made if it is missing.
            known: a text file by which a host that sees the folder is known. Without it one is written into
                the folder.
            in_parent: whether to look at the folder above it, because this one is not made yet.

        Raises:
            ConfigError: the folder cannot be written to.
            ClusterError: a host is lost.
        """
        folder = folder.absolute()
        if self._processes is None:
            return Served(folder, [])
        return Served(folder, self._processes.blind_to(folder.parent if in_parent else folder, known))

    def tell_news(self) -> None:
        """Print the news."""
        while self.news:
            print(self.news.pop(0), file=sys.stderr)  # noqa: T201 - the cell's output

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        self.note_use()
        self.ranks.require_reachable()
        if ranks is None:
            return list(range(self.world_size))
        wrong = [r for r in ranks if not 0 <= r < self.world_size]
        if wrong or not ranks:
            raise ConfigError(f"ranks = {list(ranks)} is not valid. Ranks: 0 to {self.world_size - 1}")
        return sorted(set(ranks))

    @uninterrupted()
    def _make_ready(self) -> None:
        """Have all ranks ready before work is sent, or raise the reason why they are not."""
        self.note_use()
        self.ranks.require_reachable()
        self._refuse_during_run()
        self.recovery.make_ready(self.run.folder if self.run is not None else None)

    def _refuse_during_run(self) -> None:
        if self.run is None or self.run.over:
            return
        if self.run.is_to_stop:
            raise RunError(
                f"{self.run.folder.name} was asked to stop, and is {self.run.status} until then. run.wait() waits for its "
                "end, and then cells run; no variable is lost"
            )
        raise RunError(
            f"the ranks are training ({self.run.folder.name}, {self.run.status}), and code sent to them would "
            "wait until the end. Call run.wait() or run.stop() first"
        )
