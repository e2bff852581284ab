"""The registry of this user's clusters on this host, with their GPUs and their state.

Each cluster has a JSON file, its entry, in a folder that only the user can enter. The owner of the cluster
writes the entry, with everything that another process needs to list, end or take over the cluster. An entry
is valid while one of the processes lives that it names by pid and start time, so nothing needs to be undone
when processes are killed. The entry is also the lease on the cluster's GPUs: a lock on the folder prevents
two processes from taking the same GPU.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.config import ClusterConfig, site, site_file
from nbgpu.errors import ClusterError, NoClusterError
from nbgpu.machine.clock import boot_id
from nbgpu.machine.files import write_whole
from nbgpu.machine.processes import ProcessId
from nbgpu.machine.transports import ChosenTransport
from nbgpu.protocol.hosts import JoinedHost
from nbgpu.protocol.records import Device
from nbgpu.version import VERSION

STATE_VARIABLE = "NBGPU_STATE_DIR"
"""The environment variable that names the folder of the entries, in place of ~/.local/state/nbgpu."""

State = Literal["starting", "running", "kept", "left over"]


class ClusterRecord(BaseModel):
    """The part of an entry that every version of nbgpu can read: enough to list a cluster, to end it and to
    know its GPUs. The names and formats of these fields never change."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Annotated[str, Field(pattern="^[0-9a-f]+$")]
    version: str = ""
    """The version of nbgpu that wrote the entry; empty for versions that did not write it."""
    boot: str
    """The id of the host's boot. Pids and start times are valid until the next boot."""
    owner: ProcessId
    """The notebook's kernel, or the script, that controls the cluster or controlled it last."""
    notebook: str
    """The name of the owner: the notebook's path if it is known."""
    folder: Path
    """The cluster's private folder."""
    started_s: float
    """In seconds since the epoch."""
    leaders: dict[str, ProcessId] = {}
    """The fork server and the controller, by their names in messages; empty while they start."""
    engines: dict[int, ProcessId] = {}
    """The engines on this host, by rank."""
    run: Path | None = None
    """The folder of the newest run."""
    job: str = ""
    """The number of the Slurm job with the ranks, or the numbers of its steps, as arguments of scancel; empty
    without Slurm."""

    @abstractmethod
    def gpus(self) -> list[str]:
        """The UUIDs of the cluster's GPUs, each once."""

    @abstractmethod
    def device_names(self) -> list[str]:
        """The names of the devices by rank: 'GPU 0', 'CPU'."""

    @abstractmethod
    def ranks_on(self, uuid: str) -> list[int]:
        """The ranks on a GPU; empty if they are not known."""

    @abstractmethod
    def is_to_be_kept(self) -> bool:
        """Whether the cluster was started with `keep`, and outlives its owner."""

    def alive(self) -> bool:
        """Whether a process of the cluster runs. While the cluster starts, whether its owner runs."""
        if self.boot != boot_id():
            return False
        processes = [*self.leaders.values(), *self.engines.values()]
        return any(process.alive() for process in processes or [self.owner])

    def state(self) -> State:
        """The state of a cluster that is alive."""
        if self.owner.alive():
            return "running" if self.engines else "starting"
        is_kept = self.is_to_be_kept() and all(process.alive() for process in self.leaders.values())
        return "kept" if is_kept else "left over"

    def answers_to(self, name: str) -> bool:
        """Whether a person may mean this cluster with a name: its id, the path or file name of its notebook,
        or the pid of one of its processes."""
        pids = [self.owner.pid, *(p.pid for p in [*self.leaders.values(), *self.engines.values()])]
        return name in (self.id, self.notebook, Path(self.notebook).name, *map(str, pids))

    def describe(self) -> str:
        """The name of the cluster in messages: '3fa2b1 (train.ipynb, process 1234)'."""
        return f"{self.id} ({self.notebook}, process {self.owner.pid})"


class Entry(ClusterRecord):
    """The entry of a cluster of this version of nbgpu. A field that is added here is stored and restored
    without any other change, once `Cluster` sets it."""

    config: ClusterConfig
    devices: tuple[Device, ...]
    """The devices by rank."""
    chosen_transport: ChosenTransport
    """The transport between the ranks, and those that have failed."""
    assignment: RankAssignment = RankAssignment()
    hosts: tuple[JoinedHost, ...] = ()
    """The other hosts of the cluster; empty if the ranks are on this one."""
    most_ranks: int | None = None
    """The largest number of ranks that the person wants on these hosts; None for one on each device."""
    launched: dict[str, Any] = {}
    """The `record` of the launcher that has started the hosts: another process needs it to end them."""

    def gpus(self) -> list[str]:
        return list(dict.fromkeys(d.uuid for d in self.devices if d.kind == "cuda"))

    def ranks_on(self, uuid: str) -> list[int]:
        return [rank for rank, device in enumerate(self.devices) if device.uuid == uuid]

    def device_names(self) -> list[str]:
        """The names of the devices by rank. If the ranks are on other hosts, the host's name stands in front,
        and ranks that were not started yet are left out, because their hosts are not known."""
        names = [f"GPU {d.index}" if d.kind == "cuda" else "CPU" for d in self.devices]
        if not self.hosts:
            return names
        processes = self.assignment.processes
        return [f"{processes[rank].host} {name}" for rank, name in enumerate(names) if rank in processes]

    def is_to_be_kept(self) -> bool:
        return self.config.keep

    def state(self) -> State:
        """The state of a cluster that is alive."""
        state = super().state()
        # Ranks on other hosts are in the assignment, but not among the engines of this host.
        return "running" if state == "starting" and self.assignment.engines else state

    def engines_with(self, pids: Mapping[int, int]) -> dict[int, ProcessId]:
        """Return the processes of engines, by rank.

        Args:
            pids: the pids of the engines, by rank. An engine that has ended is left out, unless it is in this
                entry already.
        """
        engines = {rank: p for rank, p in self.engines.items() if pids.get(rank) == p.pid}
        for rank in pids.keys() - engines.keys():
            with suppress(ProcessLookupError):
                engines[rank] = ProcessId.of(pids[rank])
        return engines


class EntryOfAnotherVersion(ClusterRecord):
    """The entry of a cluster of another version of nbgpu, which this version cannot read as an `Entry`."""

    config: dict[str, Any] = {}
    devices: tuple[dict[str, Any], ...] = ()
    unknown: str = Field("", exclude=True)
    """The fields that this version cannot read, for messages."""

    def gpus(self) -> list[str]:
        uuids = [device.get("uuid") for device in self.devices if device.get("kind") == "cuda"]
        return list(dict.fromkeys(uuid for uuid in uuids if isinstance(uuid, str)))

    def ranks_on(self, uuid: str) -> list[int]:
        return []

    def device_names(self) -> list[str]:
        return [f"GPU {d.get('index', '?')}" if d.get("kind") == "cuda" else "CPU" for d in self.devices]

    def is_to_be_kept(self) -> bool:
        return self.config.get("keep") is True

    def refusal(self) -> str:
        """Say why this version cannot take over the cluster, and what to do."""
        by = f"nbgpu {self.version}" if self.version else "another version of nbgpu"
        return (
            f"cluster {self.describe()} was started by {by}, and nbgpu {VERSION} cannot read its entry "
            f"({self.unknown}). Attach to it with that version, or end it: nbgpu stop {self.id}"
        )


AnyEntry = Entry | EntryOfAnotherVersion


def folder() -> Path:
    """Return the folder of the entries, and make it if it does not exist.

    Raises:
        ClusterError: the folder cannot be made, or other users may write in it.
    """
    base = os.environ.get(STATE_VARIABLE)
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    # One folder for each host, because several hosts may share a home folder.
    path = (Path(base) if base else Path(state_home) / "nbgpu") / os.uname().nodename
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"{path} cannot be made ({error.strerror}), where nbgpu notes which cluster has which GPU. Name another "
            f"folder in the environment variable {STATE_VARIABLE}"
        ) from None
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ClusterError(
            f"{path} belongs to another user, or others may write in it, and is not trusted. Name another folder in "
            f"the environment variable {STATE_VARIABLE}, or: chmod 700 {path}"
        )
    return path


def new_entry(
    config: ClusterConfig,
    devices: tuple[Device, ...],
    chosen_transport: ChosenTransport,
    cluster_folder: Path,
) -> Entry:
    """Make the entry of a cluster that this process is about to start."""
    return Entry(
        id=secrets.token_hex(3),
        version=VERSION,
        boot=boot_id(),
        owner=ProcessId.of(os.getpid()),
        notebook=_process_name(),
        config=config,
        devices=devices,
        chosen_transport=chosen_transport,
        folder=cluster_folder,
        started_s=time.time(),
    )


def claim(entry: Entry, choose: Callable[[Sequence[AnyEntry]], tuple[Device, ...]] | None = None) -> Entry:
    """Register a cluster that is about to start or to grow, and thereby take its GPUs.

    Args:
        entry: the cluster's entry.
        choose: a function that chooses the devices, given the other clusters. It runs under the lock, when no
            other process of this user can take a GPU. None takes the devices of the entry.

    Returns:
        The entry with the chosen devices.

    Raises:
        ConfigError: this user would have more GPUs than the site allows one person.
        ClusterError: another cluster has one of the GPUs, and the settings do not allow sharing.
    """
    with _locked():
        others = [other for other in _entries() if other.id != entry.id]
        if choose is not None:
            entry = entry.model_copy(update={"devices": choose(others)})
        if not entry.config.share_gpus:
            _refuse_gpus_in_use(entry.devices, others)
        if entry.config.is_local:
            _refuse_beyond_limit(entry, others)
        update(entry)
    return entry


def require_free(devices: Iterable[Device]) -> None:
    """Raise ClusterError if a cluster has one of these GPUs now. This claims nothing."""
    with _locked():
        _refuse_gpus_in_use(devices, _entries())


def update(entry: Entry) -> None:
    """Write the new or changed entry of a cluster."""
    write_whole(_path(entry), entry.model_dump_json(), mode=0o600)


def remove(entry: ClusterRecord) -> None:
    """Remove the entry of a cluster that has ended. A second call does nothing."""
    _path(entry).unlink(missing_ok=True)


def entries() -> list[AnyEntry]:
    """Return the clusters that are alive, the oldest first, and remove the entries and folders of others."""
    with _locked():
        return _entries()


def unreadable() -> list[Path]:
    """Return the JSON files in the registry's folder that are not entries of any version of nbgpu."""
    paths = [path for path in sorted(folder().glob("*.json")) if _read(path) is None]
    # An entry may have been removed between the glob and the read.
    return [path for path in paths if path.is_symlink() or path.exists()]


def kept_of_this_notebook() -> list[AnyEntry]:
    """Return the clusters that earlier kernels of this notebook have kept running, the oldest first."""
    name = _process_name()
    return [entry for entry in entries() if entry.state() == "kept" and entry.notebook == name]


def take_over(name: str | None) -> Entry:
    """Make this process the owner of a kept cluster.

    Args:
        name: a name of the cluster, as in `ClusterRecord.answers_to`; None if there is only one.

    Raises:
        NoClusterError: there is no kept cluster, or none of that name.
        ClusterError: there are several and no name was given, the cluster still has its owner, or another
            version of nbgpu has started it.
    """
    with _locked():
        clusters = _entries()
        named = [e for e in clusters if name is None or e.answers_to(name)]
        # This process may own the cluster already, if it failed to connect after an earlier take-over.
        this_process = ProcessId.of(os.getpid())
        kept = [e for e in named if e.state() == "kept" or (e.owner == this_process and e.is_to_be_kept())]
        if not kept:
            owners = "; ".join(
                f"{e.describe()} has it" for e in named if e.state() in ("running", "starting")
            )
            if owners:
                raise ClusterError(
                    f"a cluster is controlled by one notebook at a time, and {owners}. Work there, or shut its kernel "
                    "down first; a cluster that was started with --keep goes on without it"
                )
            others = (
                f" of that name ({name}). Kept: {_listed(clusters)}" if name is not None and clusters else ""
            )
            raise NoClusterError(
                f"there is no kept cluster{others}. `nbgpu ps` lists what there is; %nbgpu start --keep starts one "
                "that outlives its notebook"
            )
        if len(kept) > 1:
            raise ClusterError(
                f"there are {len(kept)} kept clusters. Say which: nbgpu.attach(ID), with one of {_listed(kept)}"
            )
        (entry,) = kept
        if isinstance(entry, EntryOfAnotherVersion):
            raise ClusterError(entry.refusal())
        fields = {"owner": this_process, "notebook": _process_name(), "version": VERSION}
        taken = entry.model_copy(update=fields)
        update(taken)
        return taken


def remove_cluster_folder(cluster_folder: Path) -> None:
    """Remove a cluster's private folder. Do nothing if the path is not that of such a folder."""
    if not cluster_folder.name.startswith("nbgpu-") or cluster_folder.is_symlink():
        return
    with suppress(FileNotFoundError):
        if cluster_folder.stat().st_uid == os.getuid():
            shutil.rmtree(cluster_folder, ignore_errors=True)


def _refuse_gpus_in_use(devices: Iterable[Device], others: list[AnyEntry]) -> None:
    """Raise ClusterError if other clusters have any of these GPUs, with a line for each GPU."""
    lines = []
    for device in dict.fromkeys(d for d in devices if d.kind == "cuda"):
        for other in others:
            if device.uuid in other.gpus():
                since = time.strftime("%H:%M on %d %B", time.localtime(other.started_s))
                lines.append(
                    f"{device.label()} ({device.uuid}) is in use by {other.notebook} (cluster {other.id}, process "
                    f"{other.owner.pid}) since {since}. To end that: nbgpu stop {other.id}"
                )
    if lines:
        lines.append("Or name other GPUs with --gpus, or take GPUs that are in use with --share-gpus")
        raise ClusterError("\n".join(lines))


def gpus_here(clusters: Iterable[AnyEntry]) -> set[str]:
    """Return the UUIDs of the GPUs that clusters have, without those on other hosts."""
    local = [entry for entry in clusters if not (isinstance(entry, Entry) and entry.hosts)]
    return {uuid for entry in local for uuid in entry.gpus()}


def _refuse_beyond_limit(entry: Entry, others: Sequence[AnyEntry]) -> None:
    """Raise ConfigError if the cluster would give this user more GPUs than the site allows one person. GPUs
    that the entry shares with another cluster count once."""
    gpus = set(entry.gpus())
    if not gpus:
        return
    with_other_gpus = [other for other in others if gpus_here([other]) - gpus]
    site.require_within_limit(len(gpus), len(gpus_here(others) - gpus), _listed(with_other_gpus))


def _listed(clusters: Sequence[AnyEntry]) -> str:
    return ", ".join(entry.describe() for entry in clusters) or "none"


def _entries() -> list[AnyEntry]:
    """Return the entries of clusters that are alive, the oldest first, and remove the others, with their
    clusters' folders. Call this with the registry locked."""
    alive: list[AnyEntry] = []
    for path in sorted(folder().glob("*.json")):
        entry = _read(path)
        if entry is None:
            continue
        if entry.alive():
            alive.append(entry)
        else:
            path.unlink(missing_ok=True)
            # The owner reads there how its ranks ended.
            if not entry.owner.alive():
                remove_cluster_folder(entry.folder)
    return sorted(alive, key=lambda entry: entry.started_s)


def _read(path: Path) -> AnyEntry | None:
    """Read one entry. Return None if the file does not exist, cannot be read, is not a regular file of this
    user, or is no entry."""
    try:
        # Opening a pipe would block, and a symbolic link may lead anywhere.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                return None
            entry = _parsed(file.read())
    except (OSError, ValidationError):
        return None
    return entry if _path(entry) == path else None


def _parsed(text: bytes) -> AnyEntry:
    """Parse an entry of this version or of another one. Raise ValidationError if the text is neither."""
    try:
        # The settings of an existing cluster are fixed: no default of the site's file may change them.
        with site_file.ignored():
            return Entry.model_validate_json(text)
    except ValidationError as error:
        unknown = "; ".join(".".join(map(str, e["loc"])) + f": {e['msg']}" for e in error.errors())
    return EntryOfAnotherVersion.model_validate_json(text).model_copy(update={"unknown": unknown})


def _path(entry: ClusterRecord) -> Path:
    return folder() / f"{entry.id}.json"


@contextmanager
def _locked() -> Iterator[None]:
    """Keep other processes from using the registry in the context. The system releases the lock if this
    process is killed."""
    lock = folder() / "lock"
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ClusterError(f"{lock} cannot be used as a lock ({error.strerror}): remove it") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _process_name() -> str:
    """Return the name by which the user knows this process: the notebook's path, which a Jupyter server puts
    into the kernel's environment, or the name of the script."""
    if notebook := os.environ.get("JPY_SESSION_NAME"):
        return notebook
    script = sys.argv[0] if sys.argv else ""
    if script.endswith("ipykernel_launcher.py"):
        return "a notebook"
    return Path(script).name or "python"
