"""The processes of a cluster on this host: ipyparallel's controller, the fork server and its engines."""

from __future__ import annotations

import json
import logging
import math
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from traitlets.log import get_logger

from nbgpu.client.engines import preloading
from nbgpu.client.engines.other_hosts.other_host import HostLostError, OtherHost
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.host import launch
from nbgpu.host.endings import Whose
from nbgpu.host.host import Host
from nbgpu.host.this_host import ThisHost
from nbgpu.machine import numa, processes, watched
from nbgpu.machine.processes import EngineProcess, ProcessId
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.calls import Call
from nbgpu.protocol.cluster_processes import ABORT_HUNG, KEPT
from nbgpu.protocol.meeting import MEETING

logging.getLogger("nbgpu.cluster").addHandler(logging.NullHandler())

GONE_WITH_HOST = "is gone with its host, which is not heard any more"
"""Reported as an engine's end when its host is lost, and its exit status with it."""
_OBITUARY_PATIENCE_S = 0.2
_EXIT_CODE_PATIENCE_S = 1.0
_LOOK_PERIOD_S = 0.05
"""Cells that are sent every few milliseconds do not look at the processes each time."""
_CONTROLLER_PATIENCE_S = 1.0
_NEWS_PATIENCE_S = 5.0
"""The controller tells a client of an engine once. A client that connects while the engine registers may miss
that, and would wait for ever: after this time another one asks for all that are there."""
_FAREWELL_S = 3.0
_serializers_tables = threading.Lock()


class Place(NamedTuple):
    """What the ranks on a host must know of it."""

    name: str
    interface: str
    """Over which they talk to other hosts; empty if there are none."""
    folder: str
    meeting_file: str
    num_cores: int | None
    """None for those of this host."""
    numa_nodes: Mapping[str, str]
    """What `machine.numa.bindable` returned there."""
    clock_ahead_s: float = 0.0
    """How far its clock is ahead of this host's."""


class Processes:
    """The processes of one cluster, which this process or a kernel that is gone has started.

    Args:
        folder: the cluster's own, which only the user can enter; it goes when the cluster ends.
        leaders: of the processes' groups, by what messages call them; empty before the start.
    """

    def __init__(self, folder: Path, leaders: Mapping[str, ProcessId] | None = None) -> None:
        self.leaders = dict(leaders or {})
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """The leaders that this process has started."""
        self._reachable_mono_s = -math.inf
        self._use_folder(folder, from_start=not leaders)

    def _use_folder(self, folder: Path, from_start: bool) -> None:
        self.folder = folder
        self.this_host: Host = ThisHost(folder, from_start)
        self.hosts: dict[str, Host] = {self.this_host.name: self.this_host}
        self.others: list[OtherHost] = []
        self.left: list[OtherHost] = []
        """Hosts that are lost, and that the cluster goes on without."""
        self.without_ranks: list[OtherHost] = []
        """Hosts that belong to the cluster and have no ranks, because there are fewer ranks than devices."""
        self._when_lost: Callable[[], str] = str

    @classmethod
    def prepare(cls) -> Self:
        """The processes of a cluster that is to be started. Its folder has a name, but does not exist yet."""
        return cls(launch.new_folder())

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients."""
        return self.folder / "profile" / "security" / f"ipcontroller-{launch.CLUSTER_ID}-client.json"

    @property
    def meeting_file(self) -> Path:
        """The file that says where the ranks meet. It is there before `connection_file` is."""
        return self.folder / MEETING

    def launch(self, environment: Mapping[str, str], ip: str = "") -> None:
        """Launch the fork server and the controller, or take over the preloaded ones, and return at once.

        Args:
            environment: the engines' variables beside this process's own.
            ip: where the ranks will be on other hosts, the address at which the controller listens for them.
        """
        if ip:
            preloading.dismiss()
        ready = None if ip else preloading.take(environment)
        launched = ready or launch.launch(self.folder, environment, ip)
        self._use_folder(launched.folder, from_start=True)
        self._children = launched.children
        for name, child in launched.children.items():
            try:
                self.leaders[name] = ProcessId.of(child.pid)
            except ProcessLookupError:
                raise self._ended_during_start([name]) from None

    def start_engines(self, num_engines: int) -> None:
        """Ask the fork server to fork the first engines when it is ready, and return at once."""
        self.this_host.begin_engines(num_engines)

    # Cut in two, the client would leave a thread and sockets that nobody knows.
    @uninterrupted()
    def connect(self, num_engines: int, timeout_s: float) -> Any:
        """Return ipyparallel's client when every engine has registered.

        Raises:
            ClusterError: a process ended, or an engine did not come in time.
        """
        # Here, because the processes are launched before ipyparallel is imported, which takes a quarter of a
        # second.
        from nbgpu.client.engines.connection import Client

        deadline_s = time.monotonic() + timeout_s
        while (connection := self._connection()) is None:
            self._check_start(0, num_engines, deadline_s, timeout_s)
        _fill_serializers_tables()
        # A client may miss the news of an engine, so one that has waited in vain is replaced by a new one.
        client = None
        patience_s, news_patience_s = _CONTROLLER_PATIENCE_S, _NEWS_PATIENCE_S
        ask_again_mono_s = math.inf
        try:
            while client is None or len(client.ids) < num_engines:
                if client is None:
                    try:
                        with _hide_unsigned_warning():
                            client = Client(connection, timeout=min(patience_s, timeout_s))
                    except TimeoutError:
                        # It may have ended just after it had written how it is reached, or have much to do:
                        # then it gets longer.
                        self._check_start(0, num_engines, deadline_s, timeout_s)
                        patience_s *= 2
                    ask_again_mono_s = time.monotonic() + news_patience_s
                    continue
                self._check_start(len(client.ids), num_engines, deadline_s, timeout_s)
                if time.monotonic() > ask_again_mono_s:
                    client.close()
                    client = None
                    news_patience_s *= 2
        except BaseException:
            if client is not None:
                client.close()
            raise
        return client

    def new_engine(self, host: str, take: Callable[[EngineProcess, int], None]) -> None:
        """Start one more engine.

        Args:
            host: the name of the host on which it is to run.
            take: called with the process and the number under which the engine registers with ipyparallel in
                a moment. From then on the engine belongs to the caller. If an interrupt comes before that,
                the engine is ended.
        """
        with self._answering():
            self.hosts[host].fork_engine(lambda pid, engine: take(EngineProcess(host, pid), engine))

    def prepare_engines(self, recipes: Sequence[str]) -> None:
        """Ask the fork server to import what later engines need to train with these recipes, and return
        at once."""
        with self._answering():
            for host in self.with_ranks:
                host.prepare_to_train(recipes)

    @property
    def with_ranks(self) -> list[Host]:
        """The hosts that have ranks: the others if there are others."""
        return [*self.others] or [self.this_host]

    def use(self, others: Sequence[OtherHost], when_lost: Callable[[], str]) -> None:
        """Have the ranks on these hosts, which have dialled in, and not on this one.

        Args:
            others: the hosts.
            when_lost: a function that says, in whole sentences, what to do when one of them is lost.
        """
        self.others = list(others)
        self._when_lost = when_lost
        self.hosts.update({host.name: host for host in others})

    def lost_hosts(self) -> list[OtherHost]:
        """The hosts that have ranks and are not heard any more."""
        return [host for host in self.others if not host.is_there]

    def set_hosts_with_ranks(self, names: Collection[str]) -> None:
        """Mark the hosts with these names as those that have ranks, and the cluster's others as those
        without."""
        hosts = [*self.others, *self.without_ranks]
        self.others = [host for host in hosts if host.name in names]
        self.without_ranks = [host for host in hosts if host.name not in names]

    @property
    def when_lost(self) -> str:
        """What to do when a host is lost, in whole sentences without the last full stop."""
        return self._when_lost()

    def go_on_without(self, lost: Sequence[OtherHost]) -> None:
        """Remove lost hosts from those of the cluster. They may come back."""
        self.others = [host for host in self.others if host not in lost]
        self.without_ranks = [host for host in self.without_ranks if host not in lost]
        self.left += lost

    def take_back(self, host: OtherHost, instead_of: OtherHost) -> None:
        """Put a host that has dialled in into the place of a lost one."""
        if instead_of in self.others:
            self.others[self.others.index(instead_of)] = host
        elif instead_of in self.without_ranks:
            self.without_ranks[self.without_ranks.index(instead_of)] = host
        else:
            self.left.remove(instead_of)
            self.others.append(host)
        self.hosts[host.name] = host

    def place_of(self, host: str) -> Place:
        """Return what the ranks on a host must know of it."""
        for other in self.others:
            if other.name == host:
                there = other.description
                place = there.interface, there.folder, there.meeting_file, there.num_cores, there.numa_nodes
                return Place(host, *place, other.clock_ahead_s)
        return Place(host, "", str(self.folder), str(self.meeting_file), None, numa.bindable())

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise ClusterError if the process that starts engines does not answer."""
        try:
            yield
        except HostLostError as error:
            raise ClusterError(f"{error}. {self._when_lost()}") from None
        except (OSError, ValueError) as error:
            time.sleep(_OBITUARY_PATIENCE_S)  # until the end of a process can be seen
            self.require_reachable()
            raise ClusterError(
                f"the process that starts engines does not answer ({error!r}). Start the cluster again: %nbgpu "
                "restart"
            ) from None

    def keep(self) -> None:
        """Let the processes outlive this one."""
        (self.folder / KEPT).touch(mode=0o600)

    def end(self) -> None:
        """End all of them and what they have started, and remove the folder."""
        processes.end(self.leaders.values())
        for child in self._children.values():
            child.wait()
        self._children = {}
        watched.hide(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_others(self) -> None:
        """End the cluster's processes on the other hosts, and wait a moment for that.

        Call it while the controller runs; hosts that cannot be reached end by themselves, a little later.
        """
        if self._unreachable() is not None:
            return
        there = [*self.others, *self.without_ranks]
        for host in there:
            host.end()
        give_up_s = time.monotonic() + _FAREWELL_S
        while any(host.is_there for host in there) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_PERIOD_S)

    def require_reachable(self) -> None:
        """Raise ClusterError if the controller or the fork server is gone."""
        now_s = time.monotonic()
        if now_s - self._reachable_mono_s < _LOOK_PERIOD_S:
            return
        gone = self._unreachable()
        if gone:
            raise ClusterError(f"{gone}; the ranks cannot be reached: %nbgpu stop, then %nbgpu start")
        self._reachable_mono_s = now_s

    def _unreachable(self) -> str | None:
        """The reason why the engines can no longer be reached, in words; None while they can."""
        gone = [name for name, process in self.leaders.items() if not process.alive()]
        if not gone:
            return None
        # Only a parent learns how a process ended, and a kernel that has attached is not their parent.
        codes = {name: self._exit_code(name) for name in gone if name in self._children}
        # If one is killed, the others end in good order.
        for name, code in codes.items():
            if code is not None and code < 0:
                return f"the {name} of the cluster is gone (killed by {signal.Signals(-code).name})"
        return f"the {' and the '.join(gone)} of the cluster {'are' if len(gone) > 1 else 'is'} gone"

    def _exit_code(self, name: str) -> int | None:
        """The exit code of a process that is gone; None if it is not known."""
        try:
            return self._children[name].wait(_EXIT_CODE_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None

    def host_of(self, process: EngineProcess) -> Host:
        """The host on which an engine runs."""
        return self.hosts[process.host]

    def how_ended(self, process: EngineProcess, debug: bool) -> str | None:
        """How an engine ended, in words that follow its name; None while it lives."""
        ending = self.host_of(process).how_ended(process.pid)
        if ending is None:
            return None
        code = ending.code
        if code is None and not self._is_heard(process.host):
            return GONE_WITH_HOST
        if code == ABORT_HUNG:
            return "ended itself, because NCCL could not be aborted on its GPU"
        if code is None or code >= 0:
            return "is gone" + ("" if code is None else f", with exit code {code}")
        name = signal.Signals(-code).name
        guess = ending.killer
        if name == "SIGABRT" and not debug:
            # gloo aborts a process that is sent more than it expects.
            guess = (
                "; did the ranks call a collective with different sizes? %nbgpu stop, then %nbgpu start --debug names "
                "the calls"
            )
        return f"was killed by {name}{guess}"

    def _is_heard(self, host: str) -> bool:
        return all(other.is_there for other in self.others if other.name == host)

    def hosts_not_seeing(self, folder: Path, marker: Path | None = None) -> list[OtherHost]:
        """Return the hosts that do not see a folder: those that do not read the marker's text there.

        Args:
            folder: the folder.
            marker: a text file in it; None to write one for the moment.

        Raises:
            ConfigError: the folder cannot be written to.
            ClusterError: a host is lost.
        """
        if not self.others:
            return []
        content = marker.read_text() if marker is not None else secrets.token_hex(8)
        file = folder / f".{content}" if marker is None else marker
        try:
            if marker is None:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written to: {error.strerror}. Name another folder"
            ) from None
        try:
            asked = {host: host.tell(Call.CONTENT_ON_HOST, str(file)) for host in self.others}
            return [host for host, request in asked.items() if host.answer(request) != content]
        except OSError as error:
            raise ClusterError(f"{error}. %nbgpu restart starts the cluster again") from None
        finally:
            if marker is None:
                file.unlink(missing_ok=True)

    def log_tail(self, whose: Whose = "engines") -> str:
        """The last lines that the engines or the controller wrote, as sentences for an error message."""
        return self.this_host.log_tail(whose)

    def _connection(self) -> dict[str, Any] | None:
        """The content of ipyparallel's file for clients; None while the controller has not written all of
        it."""
        try:
            connection: dict[str, Any] = json.loads(self.connection_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return connection

    def _ended_during_start(self, gone: Sequence[str]) -> ClusterError:
        """Return the error for these processes, unless an interrupt ended them: then raise that."""
        # Until a process has a session of its own it gets the interrupts of this one's group, too.
        take_interrupt()
        log = self.log_tail("controller" if gone == ["controller"] else "engines")
        return ClusterError(f"the {' and the '.join(gone)} ended during the start. {log}")

    def _check_start(self, num_there: int, num_engines: int, deadline_s: float, timeout_s: float) -> None:
        """Wait a moment; ClusterError if a process has ended, or the engines are late."""
        gone = [name for name, process in self.leaders.items() if not process.alive()]
        gone += ["process of an engine"] * self.this_host.num_ended()
        if gone:
            raise self._ended_during_start(gone)
        if time.monotonic() > deadline_s:
            raise ClusterError(
                f"{num_there} of {num_engines} engines came within {timeout_s:g} s; give more with "
                f"start_timeout_s. {self.log_tail()}"
            )
        time.sleep(0.01)
        take_interrupt()


def _fill_serializers_tables() -> None:
    """Have ipyparallel fill the tables of its serializer, which it does at the first use. Two threads that
    each start a cluster would interfere with each other there."""
    from ipyparallel.serialize.canning import can, uncan

    with _serializers_tables:
        can(object())
        uncan(object())


@contextmanager
def _hide_unsigned_warning() -> Iterator[None]:
    """Hide a warning without cause. ipyparallel signs no messages if Curve authenticates and encrypts them,
    and jupyter_client, which does not know of Curve, warns of that."""

    def is_not_that(record: logging.LogRecord) -> bool:
        return "Message signing is disabled" not in record.getMessage()

    log = get_logger()
    if isinstance(log, logging.LoggerAdapter):
        log = log.logger
    log.addFilter(is_not_that)
    try:
        yield
    finally:
        log.removeFilter(is_not_that)
