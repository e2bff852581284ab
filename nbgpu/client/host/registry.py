"""The registry of this user's clusters on this host, with their GPUs and their state.

Each cluster has a JSON file in a folder that only the user can enter. The process that has the cluster writes
the file, with everything that another process must know to list, end or take over the cluster. Nothing needs
to be undone when processes are killed: a file counts as long as one of the processes lives that it names by
pid and start time. So the file is also the lease on the cluster's GPUs, and a lock on the folder prevents two
processes from taking the same GPU.
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
"""The environment variable that names another folder for these files than the usual one."""

State = Literal["starting", "running", "kept", "left over"]


class ClusterRecord(BaseModel):
    """The fields of an entry that every version of nbgpu can read: enough to list a cluster, to end it and to
    know its GPUs.

    Fields of this class never change their names or formats.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Annotated[str, Field(pattern="^[0-9a-f]+$")]
    version: str = ""
    """The version of nbgpu that wrote the entry; empty for versions that did not note it."""
    boot: str
    """The id of the host's boot. Pids and start times are valid until the next boot."""
    owner: ProcessId
    """The notebook's kernel, or the script, that has the cluster or had it last."""
    notebook: str
    """The name of the owner: the notebook's path where it is known."""
    folder: Path
    """The cluster's private folder."""
    started_s: float
    leaders: dict[str, ProcessId] = {}
    """The engines' common parent and the controller, by their names in messages; empty while they start."""
    engines: dict[int, ProcessId] = {}
    """The engines by rank."""
    run: Path | None = None
    """The folder of the run that was started last."""
    job: str = ""
    """The number of the Slurm job that has the ranks, or of its steps, as scancel takes them; empty where
    there is none."""

    @abstractmethod
    def gpus(self) -> list[str]:
        """The UUIDs of the cluster's GPUs, each once."""

    @abstractmethod
    def device_names(self) -> list[str]:
        """The names of the devices by rank: 'GPU 0', 'CPU'."""

    @abstractmethod
    def ranks_on(self, uuid: str) -> list[int]:
        """The ranks on a GPU; empty where they are not known."""

    @abstractmethod
    def is_to_be_kept(self) -> bool:
        """Whether the cluster was started with `keep`."""

    def alive(self) -> bool:
        """Whether any process of the cluster runs, or, while the cluster starts, whether the owner runs."""
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
        """Whether a name may mean this cluster: its id, its notebook's path or name, or the pid of one of its
        processes."""
        pids = [self.owner.pid, *(p.pid for p in [*self.leaders.values(), *self.engines.values()])]
        return name in (self.id, self.notebook, Path(self.notebook).name, *map(str, pids))

    def describe(self) -> str:
        """The cluster in words: '3fa2b1 (train.ipynb, process 1234)'."""
        return f"{self.id} ({self.notebook}, process {self.owner.pid})"


class Entry(ClusterRecord):
    """Everything that is known about one cluster. A field that is added here is stored and restored with no
    other edit, once `Cluster` fills it in."""

    config: ClusterConfig
    devices: tuple[Device, ...]
    """The devices by rank."""
    chosen_transport: ChosenTransport
    """The transport of the ranks, and those that were tried before."""
    assignment: RankAssignment = RankAssignment()
    hosts: tuple[JoinedHost, ...] = ()
    """The hosts of the cluster; empty where the ranks are on this one."""
    most_ranks: int | None = None
    """The largest number of ranks that the person wants on these hosts; None for one on each device."""
    launched: dict[str, Any] = {}
    """The launcher's own data about the hosts that it started, with which a launcher in another process can
    end them."""

    def gpus(self) -> list[str]:
        return list(dict.fromkeys(d.uuid for d in self.devices if d.kind == "cuda"))

    def ranks_on(self, uuid: str) -> list[int]:
        return [rank for rank, device in enumerate(self.devices) if device.uuid == uuid]

    def device_names(self) -> list[str]:
        """The names of the devices in the order of the ranks. Where the ranks are on other hosts, the name of
        the host stands in front, and ranks that were not started yet are left out: their host is not
        known."""
        names = [f"GPU {d.index}" if d.kind == "cuda" else "CPU" for d in self.devices]
        if not self.hosts:
            return names
        processes = self.assignment.processes
        return [f"{processes[rank].host} {name}" for rank, name in enumerate(names) if rank in processes]

    def is_to_be_kept(self) -> bool:
        return self.config.keep

    def state(self) -> State:
        """The state of a cluster that is alive. Ranks on other hosts are not among its engines here."""
        state = super().state()
        return "running" if state == "starting" and self.assignment.engines else state

    def engines_with(self, pids: Mapping[int, int]) -> dict[int, ProcessId]:
        """The engines of the ranks with these pids, including known engines that have ended."""
        engines = {rank: p for rank, p in self.engines.items() if pids.get(rank) == p.pid}
        for rank in pids.keys() - engines.keys():
            with suppress(ProcessLookupError):
                engines[rank] = ProcessId.of(pids[rank])
        return engines


class EntryOfAnotherVersion(ClusterRecord):
    """The entry of a cluster that another version of nbgpu has started, with settings that this version does
    not know."""

    config: dict[str, Any] = {}
    devices: tuple[dict[str, Any], ...] = ()
    unknown: str = Field("", exclude=True)
    """The parts that this version cannot read, for messages."""

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
        """A message that says why this version cannot use the cluster, and what to do."""
        by = f"nbgpu {self.version}" if self.version else "another version of nbgpu"
        return (
            f"cluster {self.describe()} was started by {by}, and nbgpu {VERSION} cannot read its entry "
            f"({self.unknown}). Attach to it with that version, or end it: nbgpu stop {self.id}"
        )


AnyEntry = Entry | EntryOfAnotherVersion


def folder() -> Path:
    """The folder of the entries, which is made if it does not exist; ClusterError where it cannot be used."""
    base = os.environ.get(STATE_VARIABLE)
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    # Several hosts may share a home folder, and each has processes of its own.
    place = (Path(base) if base else Path(state_home) / "nbgpu") / os.uname().nodename
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"{place} cannot be made ({error.strerror}), where nbgpu notes which cluster has which GPU. Name another "
            f"folder in the environment variable {STATE_VARIABLE}"
        ) from None
    found = place.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ClusterError(
            f"{place} belongs to another user, or others may write in it, and is not trusted. Name another folder in "
            f"the environment variable {STATE_VARIABLE}, or: chmod 700 {place}"
        )
    return place


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
        notebook=_own_name(),
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
        choose: chooses the devices, given the other clusters, while no other process can take a GPU; None for
            those of the entry.

    Returns:
        The entry with the devices that were taken.

    Raises:
        ConfigError: this user would have more GPUs than the site allows one person.
        ClusterError: another cluster has one of the GPUs, and they are not to be shared.
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
    """Raise a ClusterError if a cluster has one of these GPUs now. This claims nothing."""
    with _locked():
        _refuse_gpus_in_use(devices, _entries())


def update(entry: Entry) -> None:
    """Write the new or changed entry of a cluster."""
    write_whole(_path(entry), entry.model_dump_json(), mode=0o600)


def remove(entry: ClusterRecord) -> None:
    """Remove the entry of a cluster that has ended. Harmless when repeated."""
    _path(entry).unlink(missing_ok=True)


def entries() -> list[AnyEntry]:
    """The clusters that are alive, the oldest first. The entries and folders of dead ones are removed."""
    with _locked():
        return _entries()


def unreadable() -> list[Path]:
    """The JSON files in the registry's folder that are not entries of any version of nbgpu."""
    odd = [path for path in sorted(folder().glob("*.json")) if _read(path) is None]
    # A file may have been removed between the glob and the read.
    return [path for path in odd if path.is_symlink() or path.exists()]


def kept_of_this_notebook() -> list[AnyEntry]:
    """The clusters that earlier kernels of this notebook have left running, the oldest first."""
    name = _own_name()
    return [entry for entry in entries() if entry.state() == "kept" and entry.notebook == name]


def take_over(name: str | None) -> Entry:
    """Make this process the owner of a kept cluster.

    Args:
        name: a name of the cluster; None where there is only one.

    Raises:
        NoClusterError: there is no kept cluster, or none of that name.
        ClusterError: there are several and no name was given, its notebook still has it, or another version
            of nbgpu has started it.
    """
    with _locked():
        known = _entries()
        meant = [e for e in known if name is None or e.answers_to(name)]
        # A cluster that this process owns already is one to which it failed to connect before.
        me = ProcessId.of(os.getpid())
        kept = [e for e in meant if e.state() == "kept" or (e.owner == me and e.is_to_be_kept())]
        if not kept:
            held = "; ".join(f"{e.describe()} has it" for e in meant if e.state() in ("running", "starting"))
            if held:
                raise ClusterError(
                    f"a cluster is controlled by one notebook at a time, and {held}. Work there, or shut its kernel "
                    "down first; a cluster that was started with --keep goes on without it"
                )
            others = f" of that name ({name}). Kept: {_listed(known)}" if name is not None and known else ""
            raise NoClusterError(
                f"there is no kept cluster{others}. `nbgpu ps` lists what there is; %nbgpu start --keep starts one "
                "that outlives its notebook"
            )
        if len(kept) > 1:
            raise ClusterError(
                f"there are {len(kept)} kept clusters. Say which: nbgpu.attach(ID), with one of {_listed(kept)}"
            )
        (found,) = kept
        if isinstance(found, EntryOfAnotherVersion):
            raise ClusterError(found.refusal())
        taken = found.model_copy(update={"owner": me, "notebook": _own_name(), "version": VERSION})
        update(taken)
        return taken


def remove_cluster_folder(cluster_folder: Path) -> None:
    """Remove a cluster's private folder, if the path is one."""
    if not cluster_folder.name.startswith("nbgpu-") or cluster_folder.is_symlink():
        return
    with suppress(FileNotFoundError):
        if cluster_folder.stat().st_uid == os.getuid():
            shutil.rmtree(cluster_folder, ignore_errors=True)


def _refuse_gpus_in_use(devices: Iterable[Device], others: list[AnyEntry]) -> None:
    """Raise a ClusterError if other clusters have any of these GPUs; it names each with its cluster."""
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
    """The UUIDs of the GPUs of this host that clusters have. Those on other hosts have hosts of their own."""
    return {uuid for each in clusters if not (isinstance(each, Entry) and each.hosts) for uuid in each.gpus()}


def _refuse_beyond_limit(entry: Entry, others: Sequence[AnyEntry]) -> None:
    """Raise a ConfigError if the cluster would give this user more GPUs than the site allows one person. GPUs
    that the entry shares with another cluster count once."""
    own = set(entry.gpus())
    if not own:
        return
    have = [each for each in others if gpus_here([each]) - own]
    site.require_within_limit(len(own), len(gpus_here(others) - own), _listed(have))


def _listed(known: Sequence[AnyEntry]) -> str:
    return ", ".join(e.describe() for e in known) or "none"


def _entries() -> list[AnyEntry]:
    """Read all entries, the oldest first. Remove those of clusters of which no process is alive, with their
    folders. Call this with the registry locked."""
    found: list[AnyEntry] = []
    for path in sorted(folder().glob("*.json")):
        entry = _read(path)
        if entry is None:
            continue
        if entry.alive():
            found.append(entry)
        else:
            path.unlink(missing_ok=True)
            if not entry.owner.alive():  # otherwise the owner may still read there how its ranks ended
                remove_cluster_folder(entry.folder)
    return sorted(found, key=lambda e: e.started_s)


def _read(path: Path) -> AnyEntry | None:
    """Read one entry; None where the file is gone, is not this user's, cannot be read, or is not an entry."""
    try:
        # Opening a pipe would block, and a link may lead anywhere.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                return None
            text = file.read()
    except OSError:
        return None
    try:
        entry = _parsed(text)
    except ValidationError:
        return None
    return entry if _path(entry) == path else None


def _parsed(text: bytes) -> AnyEntry:
    """Parse an entry of this version or of another one; ValidationError if the text is no entry of any
    version."""
    try:
        with site_file.ignored():  # the settings are those of a cluster that is there
            return Entry.model_validate_json(text)
    except ValidationError as error:
        unknown = "; ".join(".".join(map(str, e["loc"])) + f": {e['msg']}" for e in error.errors())
    return EntryOfAnotherVersion.model_validate_json(text).model_copy(update={"unknown": unknown})


def _path(entry: ClusterRecord) -> Path:
    return folder() / f"{entry.id}.json"


@contextmanager
def _locked() -> Iterator[None]:
    """Keep other processes from using the registry during the block. The lock ends with this process at the
    latest."""
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


def _own_name() -> str:
    """The name by which the user knows this process. A Jupyter server names the notebook in the kernel's
    environment."""
    notebook = os.environ.get("JPY_SESSION_NAME")
    if notebook:
        return notebook
    script = sys.argv[0] if sys.argv else ""
    if script.endswith("ipykernel_launcher.py"):
        return "a notebook"
    return Path(script).name or "python"
