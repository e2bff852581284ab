"""Waits for the other hosts of a cluster, which connect to the controller by themselves ("dial in"), checks
them and starts their ranks."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nbgpu.client.engines.calls import reference
from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.host import launch, versions
from nbgpu.machine import transports
from nbgpu.machine.files import write_whole
from nbgpu.machine.processes import EngineProcess
from nbgpu.machine.signals import take_interrupt
from nbgpu.planning.host_devices import UNKNOWN
from nbgpu.protocol.calls import Call
from nbgpu.protocol.hosts import FIRST_NUMBER, HostDescription, JoinedHost, JoinFile
from nbgpu.protocol.meeting import MEETING, MeetingPlace
from nbgpu.protocol.records import Device
from nbgpu.protocol.short_cuts import VARIABLE as PLAIN_CELLS
from nbgpu.protocol.short_cuts import are_plain

if TYPE_CHECKING:
    from nbgpu.client.engines.connection import Client

_POLL_PERIOD_S = 0.02


def write_join_file(folder: Path, environment: Mapping[str, str], interface: str) -> Path:
    """Write the file with which hosts dial in, and return its path. The controller must be running.

    Args:
        folder: the cluster's folder.
        environment: the engines' environment variables.
        interface: the network interface at which the controller listens, for messages.
    """
    security = folder / "profile" / "security"
    connection = json.loads((security / f"ipcontroller-{launch.CLUSTER_ID}-engine.json").read_text())
    meeting = json.loads(MeetingPlace.read(folder / MEETING).as_json())
    path = join_file_path(folder)
    # These two depend on the GPUs and cores of each host.
    differ_by_host = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    variables = {name: value for name, value in environment.items() if name not in differ_by_host}
    if are_plain():
        variables[PLAIN_CELLS] = "1"
    try:
        working_folder = str(Path.cwd())
    except FileNotFoundError:
        working_folder = ""  # it was removed
    join = JoinFile(connection, meeting, variables, interface, working_folder)
    write_whole(path, join.as_json(), mode=0o600)
    return path


def join_file_path(folder: Path) -> Path:
    """The path of the join file in a cluster's folder."""
    return folder / "join.json"


def gather(
    client: Client, config: ClusterConfig, launcher: Launcher, check: Callable[[], None]
) -> list[OtherHost]:
    """Wait until all hosts have dialled in, and return them in the order of their names.

    Args:
        client: ipyparallel's client.
        config: the cluster's settings.
        launcher: the launcher that has started the hosts.
        check: a function that is called meanwhile, and raises if there is nothing to wait for any more.

    Raises:
        ClusterError: a host did not dial in in time, was lost again, or has other package versions.
        ConfigError: the settings cannot be honoured on one of the hosts.
    """
    give_up_s = time.monotonic() + config.start_timeout_s
    while len(engines := [number for number in client.ids if number >= FIRST_NUMBER]) < config.num_hosts:
        check()
        launcher.check()
        take_interrupt()
        if launcher.is_waiting():
            give_up_s = time.monotonic() + config.start_timeout_s
        if time.monotonic() > give_up_s:
            raise ClusterError(
                f"{len(engines)} of {config.num_hosts} host(s) dialled in within {config.start_timeout_s:g} s; give more "
                f"with start_timeout_s. {launcher.why_late()}"
            )
        time.sleep(_POLL_PERIOD_S)
    numbers = itertools.count()
    hosts: dict[str, OtherHost] = {}
    for engine, description in _descriptions(client, engines[: config.num_hosts], config, check):
        name = free_name(description.name, hosts)
        hosts[name] = OtherHost(client, engine, description, name, numbers)
    return list(hosts.values())


def free_name(name: str, taken: Container[str]) -> str:
    """Return a name for a host that is unique in the cluster: several hosts may report the same name, and the
    second one becomes 'name-2'."""
    numbered = (f"{name}-{nth}" for nth in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)


def describe_one(
    client: Client, engine: int, config: ClusterConfig, check: Callable[[], None]
) -> HostDescription:
    """Ask a host that has dialled in later for its description, and check it as `gather` does.

    Raises:
        ClusterError: the host was lost again, or has other package versions.
        ConfigError: the settings cannot be honoured on the host.
    """
    ((_, description),) = _descriptions(client, [engine], config, check)
    return description


def _descriptions(
    client: Client, engines: Sequence[int], config: ClusterConfig, check: Callable[[], None]
) -> list[tuple[int, HostDescription]]:
    """Ask hosts for their descriptions, all at the same time, and check that ranks can run there. Return
    pairs of the host's engine and the description, sorted by the host's name."""
    from ipyparallel.error import RemoteError

    backends = [transport.backend for transport in transports.candidates(config, UNKNOWN)]
    # The GPUs of a scheduler's job belong to the job: none is left out because another process uses it.
    gpus = config.named_gpus if config.launcher_settings.IS_JOB else config.gpus
    arguments = gpus, config.gpus_per_node, backends
    replies = {
        engine: client[engine].apply_async(reference(Call.DESCRIBE_HOST), *arguments) for engine in engines
    }
    described: list[tuple[int, HostDescription]] = []
    for engine, answer in replies.items():
        while not answer.wait(_POLL_PERIOD_S):
            check()
            take_interrupt()
        try:
            described.append((engine, HostDescription(**answer.get())))
        except (RemoteError, TypeError) as error:
            raise ClusterError(
                f"a host that has dialled in does not say what it has ({error}). What `nbgpu host` wrote there says more; "
                "another version of nbgpu cannot be a host"
            ) from None
    described.sort(key=lambda pair: (pair[1].name, pair[0]))
    descriptions = [description for _, description in described]
    _require_same_versions(descriptions)
    _require_usable(descriptions)
    return described


def _require_usable(descriptions: Sequence[HostDescription]) -> None:
    """Raise ConfigError if no rank can run on one of the hosts, or if some hosts have GPUs and others have
    none."""
    if problems := [f"host {d.name}: {d.problem}" for d in descriptions if d.problem]:
        raise ConfigError("\n".join(problems))
    kinds = {d.name: d.devices[0]["kind"] for d in descriptions}
    if len(set(kinds.values())) > 1:
        without = " and ".join(f"host {name}" for name, kind in kinds.items() if kind == "cpu")
        raise ConfigError(
            f"{without} has no GPU for ranks, and others have. Leave it out, or give all hosts CPU ranks with gpus='none'"
        )


def _require_same_versions(descriptions: list[HostDescription]) -> None:
    """Raise ClusterError if a host has other versions of Python or of packages than this one."""
    here = versions.here()
    wrong = [
        f"host {description.name} has {', '.join(different)}"
        for description in descriptions
        if (different := versions.differences(description.versions, here))
    ]
    if wrong:
        raise ClusterError(
            f"{'; '.join(wrong)}: all hosts need the versions of the notebook. Install them there, or start the "
            "notebook with theirs"
        )


def take_over(client: Client, joined: Iterable[JoinedHost], assignment: RankAssignment) -> list[OtherHost]:
    """Return the hosts of a cluster that another process has started.

    Args:
        client: ipyparallel's client.
        joined: the records of the hosts in the registry.
        assignment: the engines on these hosts.
    """
    numbers = {process: engine for engine, process in assignment.spares.items()}
    numbers |= {assignment.processes[rank]: engine for rank, engine in assignment.engines.items()}
    # New engines of ranks get numbers that none has had. Those from FIRST_NUMBER on are of hosts.
    used = [number for number in (*client.ids, *numbers.values()) if number < FIRST_NUMBER]
    free = itertools.count(max(used, default=-1) + 1)
    hosts = []
    for joined_host in joined:
        description = HostDescription(**joined_host.description)
        host = OtherHost(client, joined_host.engine, description, joined_host.name, free)
        host.clock_ahead_s = joined_host.clock_ahead_s
        host.take_over({process.pid: n for process, n in numbers.items() if process.host == host.name})
        hosts.append(host)
    return hosts


def devices_of(hosts: list[OtherHost]) -> list[tuple[str, Device]]:
    """The host and the device of every rank: ranks are numbered host by host."""
    return [(host.name, Device(**fields)) for host in hosts for fields in host.description.devices]


def start_ranks(
    client: Client,
    hosts: list[OtherHost],
    num_ranks: Mapping[str, int],
    config: ClusterConfig,
    check: Callable[[], None],
) -> RankAssignment:
    """Let all hosts fork their ranks at the same time, and return the assignment once all have registered.

    Args:
        client: ipyparallel's client.
        hosts: the hosts, in the order of their ranks.
        num_ranks: the number of ranks of each host, by its name; a host that is left out gets none.
        config: the cluster's settings.
        check: a function that is called meanwhile, and raises if there is nothing to wait for any more.

    Raises:
        ClusterError: a rank was not forked, or did not register in time.
    """

    @contextmanager
    def explaining(host: OtherHost) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # such as HostLostError
            raise ClusterError(f"{error}. {host.log_tail()}") from None

    # `fork_engines` returns at once, with a function that waits for the pids, so all hosts fork in parallel.
    forking = []
    for host in hosts:
        if host.name in num_ranks:
            with explaining(host):
                forking.append((host, host.fork_engines(num_ranks[host.name])))
    assignment = RankAssignment()
    for host, wait_for_pids in forking:
        with explaining(host):
            pids = wait_for_pids()
        for number, pid in pids.items():
            rank = len(assignment.engines)
            assignment.engines[rank], assignment.processes[rank] = number, EngineProcess(host.name, pid)
    give_up_s = time.monotonic() + config.start_timeout_s
    by_name = {host.name: host for host in hosts}
    while missing := [rank for rank, number in assignment.engines.items() if number not in client.ids]:
        check()
        take_interrupt()
        process = assignment.processes[missing[0]]
        host = by_name[process.host]
        if not host.is_there or host.how_ended(process.pid) or time.monotonic() > give_up_s:
            raise ClusterError(f"rank {missing[0]} of host {host.name} did not come. {host.log_tail()}")
        time.sleep(_POLL_PERIOD_S)
    return assignment
