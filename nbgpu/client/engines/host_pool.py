"""The hosts of a cluster: they are started, get ranks, may be lost and come back, and are ended."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nbgpu.client.engines.other_hosts import joining
from nbgpu.client.engines.other_hosts.other_host import HostLostError, OtherHost
from nbgpu.client.engines.processes import Processes
from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.client.launchers.launcher import Launcher, launcher_of
from nbgpu.client.launchers.notebooks_job import NotebooksJob
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError, NbgpuError, NoClusterError
from nbgpu.host import launch
from nbgpu.host.host import Host
from nbgpu.machine import numa
from nbgpu.machine.processes import EngineProcess, ProcessId, signal_name
from nbgpu.protocol.calls import Call
from nbgpu.protocol.cluster_processes import ABORT_HUNG
from nbgpu.protocol.hosts import FIRST_NUMBER, JoinedHost
from nbgpu.protocol.records import Device
from nbgpu.text.ranks import count_of_ranks

_log = logging.getLogger("nbgpu.cluster")

NOT_RUNNING = "this cluster is not running. Start it with: start(), or %nbgpu start"
GONE_WITH_HOST = "is gone with its host, which is not heard any more"
"""What messages say of an engine whose host is lost: nobody can learn its exit status."""
_ENDING_PATIENCE_S = 0.2
"""How long a fork server that has stopped answering may take to end."""
_SHUTDOWN_GRACE_S = 3.0
_POLL_PERIOD_S = 0.05
_FIRST_PERIOD_S = 2.0
_LONGEST_PERIOD_S = 30.0
"""The time between two attempts to start a lost host doubles from the first period up to this one."""


class Place(NamedTuple):
    """The properties of a host that its ranks need."""

    name: str
    interface: str
    """The network interface for collectives with other hosts; empty if there are no other hosts."""
    folder: str
    """The cluster's private folder there."""
    meeting_file: str
    """The file there that says where the rendezvous store is."""
    num_cores: int | None
    """None for the cores of this host."""
    numa_nodes: Mapping[str, str]
    """What `machine.numa.bindable` returned there."""
    clock_ahead_s: float = 0.0
    """How many seconds its clock is ahead of this host's."""


class HostPool:
    """The hosts on which a cluster has its ranks: the notebook's own, or other hosts, which dial in.

    Args:
        config: the cluster's settings.
        launcher: starts the other hosts, or has started those of a kept cluster; None to make one when it is
            needed.
        most_ranks: the largest number of ranks that the person wants on other hosts; None for one on each
            device.
    """

    def __init__(
        self, config: ClusterConfig, launcher: Launcher | None = None, most_ranks: int | None = None
    ) -> None:
        self._config = config
        self._launcher = launcher
        self.most_ranks = most_ranks
        self._listens_at = "", ""
        """The name and the address of the interface at which the controller listens for other hosts."""
        self._processes: Processes | None = None
        self.client: Any = None
        """ipyparallel's client; None while the cluster is not running."""
        self.join_file: Path | None = None
        """The file with which other hosts dial in."""
        self.hosts: dict[str, Host] = {}
        """Every host that is or was in the cluster, by its name."""
        self.members: list[OtherHost] = []
        """The other hosts that are in the cluster, also those without ranks, and those just lost."""
        self.departed: list[OtherHost] = []
        """Lost hosts without which the cluster goes on. They may come back."""
        self._refused: dict[int, str] = {}
        """The hosts that have dialled in and get no ranks: the reason, by the number of the host's engine."""
        self._closing = threading.Event()
        self._starter: threading.Thread | None = None
        self._obstacle = ""
        """Why the launcher cannot start a lost host at present; empty if nothing keeps it from that."""

    @property
    def processes(self) -> Processes:
        """The cluster's processes on this host. Raises NoClusterError if there are none."""
        if self._processes is None:
            raise NoClusterError(NOT_RUNNING)
        return self._processes

    @property
    def launcher(self) -> Launcher:
        """What starts the other hosts and ends them. Raises ConfigError if one of its settings is wrong."""
        if self._launcher is None:
            self._launcher = launcher_of(self._config)
        return self._launcher

    # The start, in the order of the calls.

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Find the network interface for other hosts, and choose the name of the cluster's folder, which does
        not exist yet.

        Args:
            tell: a function that shows a line to the person who waits for the start.

        Raises:
            ClusterError: the launcher cannot get hosts, as when Slurm does not answer.
            ConfigError: there is no such interface.
        """
        self.launcher.tell = tell
        if not self._config.is_local:
            self._listens_at = self.launcher.listen_at()
        self._processes = Processes(launch.new_folder())

    def launch(self, variables: Mapping[str, str], num_engines: int) -> None:
        """Launch the processes of this host and the first engines here, and return at once."""
        processes = self.processes
        processes.launch(variables, self._listens_at[1])
        self.hosts = {processes.this_host.name: processes.this_host}
        if num_engines:
            processes.this_host.begin_engines(num_engines)

    def connect(self, num_engines: int) -> None:
        """Connect to the controller and wait for the engines of this host."""
        self.client = self.processes.connect(num_engines, self._config.start_timeout_s)

    def gather(
        self, variables: Mapping[str, str], check: Callable[[], None], note: Callable[[], None]
    ) -> tuple[Device, ...]:
        """Start the other hosts, wait until all have dialled in, and return their devices, host by host.

        Args:
            variables: the environment of the engines.
            check: a function that raises an error when there is nothing to wait for any more.
            note: a function that is called once the launcher has started something, to store that.
        """
        interface, ip = self._listens_at
        where = f"{interface} ({ip})"
        self.join_file = joining.write_join_file(self.processes.folder, variables, where)
        self.launcher.start(self.join_file, where)
        note()
        self._admit(joining.gather(self.client, self._config, self.launcher, check))
        self.launcher.joined()
        return tuple(device for _, device in joining.devices_of(self.members))

    def start_ranks(self, num_ranks: int, check: Callable[[], None]) -> RankAssignment:
        """Start this many ranks, host by host, and return their assignment once all have registered."""
        if self._config.is_local:
            here = self.processes.this_host.name
            return RankAssignment.at_start(self.client, here, num_ranks, self._config.start_timeout_s, check)
        num_of_host = Counter(name for name, _ in joining.devices_of(self.members)[:num_ranks])
        self.mark_with_ranks(num_of_host)
        return joining.start_ranks(self.client, self.members, num_of_host, self._config, check)

    def take_over(
        self,
        folder: Path,
        leaders: Mapping[str, ProcessId],
        num_engines: int,
        joined: Sequence[JoinedHost],
        assignment: RankAssignment,
    ) -> None:
        """Connect to the hosts of a cluster that another process has started.

        Args:
            folder: the cluster's folder.
            leaders: the processes on this host that start and connect the engines: the fork server and the
                controller, by name.
            num_engines: the number of engines on this host that are still alive, which are waited for.
            joined: the records of the other hosts from the registry.
            assignment: which engine is which rank.
        """
        self._processes = Processes(folder, leaders)
        self.hosts = {self._processes.this_host.name: self._processes.this_host}
        self.connect(num_engines)
        if joined:
            self.join_file = joining.join_file_path(folder)
            self._admit(joining.take_over(self.client, joined, assignment))
            self.mark_with_ranks({process.host for process in assignment.processes.values()})

    def _admit(self, hosts: Iterable[OtherHost]) -> None:
        self.members += hosts
        self.hosts |= {host.name: host for host in self.members}

    # What runs on the hosts.

    @property
    def with_ranks(self) -> list[OtherHost]:
        """The other hosts that have ranks; empty where the ranks are on this one."""
        return [host for host in self.members if host.has_ranks]

    @property
    def rank_hosts(self) -> list[Host]:
        """The hosts that have ranks: other ones, or this one."""
        return [*self.with_ranks] or [self.processes.this_host]

    def mark_with_ranks(self, names: Collection[str]) -> None:
        """Record that the hosts of these names have ranks, and the other ones have none."""
        for host in self.members:
            host.has_ranks = host.name in names

    def place(self, host: str) -> Place:
        """Return the properties of a host, by its name."""
        for other in self.members:
            if other.name == host:
                there = other.description
                place = there.interface, there.folder, there.meeting_file, there.num_cores, there.numa_nodes
                return Place(host, *place, other.clock_ahead_s)
        here = self.processes
        return Place(host, "", str(here.folder), str(here.meeting_file), None, numa.bindable())

    def new_engine(self, host: str, take: Callable[[EngineProcess, int], None]) -> None:
        """Start one more engine.

        Args:
            host: the name of the host on which it is to run.
            take: is called with the process, and with the number under which ipyparallel will know the
                engine. The caller then has to end the engine; if an interrupt comes before, it is ended here.
        """
        with self._answering():
            self.hosts[host].fork_engine(lambda pid, engine: take(EngineProcess(host, pid), engine))

    def prepare_engines(self, recipes: Sequence[str]) -> None:
        """Ask the fork servers to import what later engines need to train with these recipes, and return
        at once."""
        with self._answering():
            for host in self.rank_hosts:
                host.prepare_to_train(recipes)

    def process_host(self, process: EngineProcess) -> Host:
        """The host on which an engine runs."""
        return self.hosts[process.host]

    def how_ended(self, process: EngineProcess) -> str | None:
        """Return how an engine ended, such as 'is gone, with exit code 1', or None while it lives."""
        ending = self.process_host(process).how_ended(process.pid)
        if ending is None:
            return None
        code = ending.code
        if code is None and process.host in [host.name for host in self.members if not host.is_there]:
            return GONE_WITH_HOST
        if code == ABORT_HUNG:
            return "ended itself, because NCCL could not be aborted on its GPU"
        if code is None or code >= 0:
            return "is gone" + ("" if code is None else f", with exit code {code}")
        name = signal_name(-code)
        guess = ending.killer
        if name == "SIGABRT" and not self._config.debug:
            # gloo aborts a process that is sent more than it expects.
            guess = (
                "; did the ranks call a collective with different sizes? %nbgpu stop, then %nbgpu start --debug names "
                "the calls"
            )
        return f"was killed by {name}{guess}"

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise ClusterError if a host or its fork server does not answer a request that is made in the
        context, with the reason: the host is lost, the fork server has ended, or it gives no valid answer."""
        try:
            yield
        except HostLostError as error:
            raise ClusterError(f"{error}. {self.launcher.when_lost()}") from None
        except (OSError, ValueError) as error:
            # One that is just ending is still found alive. Once it has ended, `require_reachable` says how.
            time.sleep(_ENDING_PATIENCE_S)
            self.processes.require_reachable()
            raise ClusterError(
                f"the process that starts engines does not answer ({error!r}). Start the cluster again: %nbgpu "
                "restart"
            ) from None

    def hosts_not_seeing(self, folder: Path, marker: Path | None = None) -> list[OtherHost]:
        """Return the hosts that do not share a folder with this one: those on which a file of the folder, the
        marker, does not have the text that it has here.

        Args:
            folder: the folder.
            marker: a text file in it; None to write one and remove it again.

        Raises:
            ConfigError: the folder cannot be written to.
            ClusterError: a host is lost.
        """
        if not self.with_ranks:
            return []
        file = marker or _new_marker(folder)
        content = file.read_text()
        try:
            asked = {host: host.tell(Call.CONTENT_ON_HOST, str(file)) for host in self.with_ranks}
            return [host for host, request in asked.items() if host.answer(request) != content]
        except OSError as error:
            raise ClusterError(f"{error}. %nbgpu restart starts the cluster again") from None
        finally:
            if marker is None:
                file.unlink(missing_ok=True)

    # Hosts that are lost, and that come back.

    def lost(self) -> list[OtherHost]:
        """The hosts that have ranks and have lost their connection."""
        return [host for host in self.with_ranks if not host.is_there]

    def missing(self) -> list[OtherHost]:
        """All hosts that may come back: those with ranks that are lost, then those without which the cluster
        goes on, then lost ones that have no ranks."""
        idle = [host for host in self.members if not host.is_there and not host.has_ranks]
        return [*self.lost(), *self.departed, *idle]

    def go_on_without(self, lost: Sequence[OtherHost]) -> None:
        """Take lost hosts out of the cluster. They may come back."""
        for host in lost:
            host.has_ranks = False
        # In this order, because the thread of `_keep_starting` ends as soon as no host is missing.
        self.departed += lost
        self.members = [host for host in self.members if host not in lost]

    def has_come(self, num_ranks: int) -> bool:
        """Whether a host has dialled in that can replace a lost one without ranks, and the cluster may have
        more than its present `num_ranks` ranks."""
        has_room = self.most_ranks is None or num_ranks < self.most_ranks
        is_waited_for = any(not host.has_ranks for host in self.missing())
        return has_room and is_waited_for and bool(self.new_engines())

    def start_again(self) -> None:
        """Let the launcher start lost hosts again, on a background thread, until all have come back."""
        if self.launcher.starts_again and (self._starter is None or not self._starter.is_alive()):
            self._starter = threading.Thread(target=self._keep_starting, name="nbgpu-hosts", daemon=True)
            self._starter.start()

    def _keep_starting(self) -> None:
        """Let the launcher start lost hosts again, with growing pauses, until none is missing."""
        assert self.join_file is not None, "there are other hosts"
        period_s = _FIRST_PERIOD_S
        while self.missing() and not self._closing.is_set():
            try:
                self._obstacle = self.launcher.start_again(self.join_file)
            except NbgpuError as error:
                self._obstacle = str(error)
            except Exception as error:  # noqa: BLE001 - it is logged
                # Try again: if the thread ended here, the host would never come back.
                _log.exception("a lost host could not be started again")
                self._obstacle = repr(error)
            self._closing.wait(period_s)
            period_s = min(2 * period_s, _LONGEST_PERIOD_S)
        self._obstacle = ""

    def replace_lost(self) -> list[tuple[OtherHost, OtherHost]]:
        """Replace lost hosts by hosts that have dialled in since. No rank runs on these yet.

        A host replaces the lost one of the same name, or else the first lost one, and must have the same
        devices by number and kind. A host that does not fit is refused for good.

        Returns:
            Pairs of a lost host and the one that replaces it.
        """
        replaced = []
        for engine in self.new_engines() if self.missing() else []:
            if not (missing := self.missing()):
                break
            try:
                description = joining.describe_one(
                    self.client, engine, self._config, self.processes.require_reachable
                )
            except NbgpuError as error:
                self._refused[engine] = str(error)
                continue
            same_name = [host for host in missing if host.description.name == description.name]
            lost = (same_name or missing)[0]
            before, now = lost.description.devices, description.devices
            if [device["kind"] for device in before] != [device["kind"] for device in now]:
                self._refused[engine] = (
                    f"host {description.name} has {_count_devices(now)}, and host {lost.name} had {_count_devices(before)}"
                )
                continue
            name = lost.name if same_name else joining.free_name(description.name, self.hosts)
            host = lost.make_successor(engine, description, name)
            self._replace(lost, host)
            replaced.append((lost, host))
        return replaced

    def _replace(self, lost: OtherHost, host: OtherHost) -> None:
        """Put a host in the place of a lost one."""
        host.has_ranks = lost.has_ranks
        if lost in self.members:
            self.members[self.members.index(lost)] = host
        else:
            self.departed.remove(lost)
            self.members.append(host)
        self.hosts[host.name] = host

    def new_engines(self) -> list[int]:
        """Return the numbers of the engines of hosts that have dialled in, and are neither in the cluster nor
        refused."""
        excluded = {host.engine for host in self.members} | self._refused.keys()
        return [number for number in self.client.ids if number >= FIRST_NUMBER and number not in excluded]

    def obstacles(self) -> Sequence[str]:
        """The known reasons why lost hosts are not back yet, as sentences."""
        refusals = [reason for engine, reason in self._refused.items() if engine in self.client.ids]
        return [*refusals, *filter(None, [self._obstacle, self.launcher.obstacle()])]

    # The end.

    def jobs(self) -> list[Launcher | NotebooksJob]:
        """The Slurm jobs at whose time limits the ranks or the notebook end."""
        jobs: list[Launcher | NotebooksJob] = []
        if self._config.launcher_settings.IS_JOB:
            jobs.append(self.launcher)
        if not self.launcher.uses_notebooks_job and (job := NotebooksJob.that_ends_this_process()):
            jobs.append(job)
        return jobs

    def end_others(self) -> None:
        """Start no more hosts, end the cluster's processes on other hosts, and wait a moment for their end.

        Call this while the controller runs. Hosts that cannot be reached end by themselves, a little later.
        """
        self._closing.set()
        if self._processes is None or self._processes.unreachable() is not None:
            return
        for host in self.members:
            host.end()
        give_up_s = time.monotonic() + _SHUTDOWN_GRACE_S
        while any(host.is_there for host in self.members) and time.monotonic() < give_up_s:
            time.sleep(_POLL_PERIOD_S)

    def end(self) -> None:
        """End the processes of this host."""
        if self._processes is not None:
            self._processes.end()

    def end_launcher(self) -> None:
        """End everything that the launcher has started and that still runs."""
        if self._launcher is not None:
            self._launcher.end()


def _count_devices(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of a host's ranks by the kind of their device, such as '2 ranks (cuda)'."""
    kinds = ", ".join(dict.fromkeys(device["kind"] for device in devices))
    return f"{count_of_ranks(len(devices))} ({kinds})"


def _new_marker(folder: Path) -> Path:
    """Write a text file with a random name into a folder, which is made if necessary, and return its path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    content = secrets.token_hex(8)
    marker = folder / f".{content}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(content)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}. Name another folder") from None
    return marker
