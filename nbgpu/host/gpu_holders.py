"""Find the holders of GPUs, for the cards of the devices and for clusters that take free GPUs.

There are two sources: nbgpu's registry, which has this user's clusters with their notebooks, also while they
compute nothing, and NVML, which has the processes of all users. In a container NVML may return the pids of
the host, which are unknown in the container or belong to other processes there. So a process counts only if
/proc shows that it uses a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import psutil

from nbgpu.machine import processes
from nbgpu.machine.gpus.readings import DeviceReading, GpuProcess
from nbgpu.machine.processes import ProcessId
from nbgpu.text.ranks import named_ranks
from nbgpu.text.sizes import in_words

State = Literal["free", "this notebook", "yours", "others", "unreadable"]

DRIVER_FILES = "/dev/nvidia"
"""Every process that computes on a GPU has open files whose paths start with this."""
_IDLE_BYTES = 2**30
"""A GPU with more used memory than this counts as in use even if NVML lists no process. The driver uses less,
and the memory of a desktop is not counted."""
_MAX_NAMED = 3
_SHARING = "You would share its memory and its time."


class ClusterEntry(Protocol):
    """The registry entry of one of this user's clusters, with the parts that are needed here."""

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> ProcessId: ...

    @property
    def notebook(self) -> str: ...

    @property
    def started_s(self) -> float: ...

    @property
    def leaders(self) -> Mapping[str, ProcessId]: ...

    @property
    def engines(self) -> Mapping[int, ProcessId]: ...

    def gpus(self) -> list[str]: ...

    def ranks_on(self, uuid: str) -> list[int]: ...

    def state(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a GPU, as cards and messages describe it."""

    state: State
    words: str
    """A short description: 'free', 'train.ipynb (rank 0)', 'user ada'."""
    why: str = ""
    """For a GPU that is not free: a sentence on its use, with advice."""
    in_detail: str = ""
    """For a GPU that is not free: the holder, since when, and with how much memory."""
    are_others: bool = False
    """Whether other people use the GPU, or may use it."""

    @property
    def is_free(self) -> bool:
        """Whether nobody has the GPU. The cards, the control panel and the clusters all use this property."""
        return self.state == "free"


@dataclass(frozen=True, slots=True)
class _ProcessOwner:
    """The owner of a process, as cards and messages describe it."""

    words: str
    """The owner for the title of a card, such as 'user ada'."""
    sentence: str
    """The owner within a sentence, with the process if it is visible: 'your process 12 (python)'."""
    is_this_user: bool
    since_s: float | None = None
    """When the process began, in seconds since the epoch; None for a process that is not visible."""


class Holders:
    """Finds the holders of GPUs, and caches the owners of processes."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, float], _ProcessOwner | None] = {}
        """The owner of each process, by pid and start time; None for a process that uses no GPU."""

    def of(
        self, reading: DeviceReading, clusters: Sequence[ClusterEntry], reserved_by: int | None = None
    ) -> Holder:
        """Return the holder of a GPU.

        Args:
            reading: the state of the GPU.
            clusters: all clusters of this user.
            reserved_by: the process that has reserved the GPU for a cluster of any user; None if none has.
        """
        if reading.problem:
            return Holder(
                "unreadable",
                "cannot be read",
                f"The driver cannot read it: {reading.problem}. nvidia-smi may say more; a GPU that is lost comes "
                "back with a reboot.",
                f"cannot be read: {reading.problem}",
            )
        holding = [entry for entry in clusters if reading.device.uuid in entry.gpus()]
        ours = {p.pid for entry in holding for p in [*entry.engines.values(), *entry.leaders.values()]}
        strangers = self._strangers(reading, ours)
        # A reservation adds nothing if NVML already lists a process of another user.
        if reserved_by is not None and not _belong_to_others(strangers):
            strangers += self._reserving(reserved_by)
        names = listed([person.words for _, person in strangers])
        if holding:
            holder = _clusters(reading, holding)
            if not strangers:
                return holder
            return Holder(
                holder.state,
                f"{holder.words}, {names}",
                f"{holder.why} {_describe_use(strangers)}".strip(),
                f"{holder.in_detail}; {_details(strangers)}",
                _belong_to_others(strangers),
            )
        if strangers:
            return Holder(
                "others",
                names,
                f"{_describe_use(strangers)} {_advice(strangers)}",
                _details(strangers),
                _belong_to_others(strangers),
            )
        unexplained_bytes = (reading.used_bytes or 0) - reading.graphics_bytes
        if unexplained_bytes > _IDLE_BYTES:
            amount = in_words(unexplained_bytes)
            return Holder(
                "others",
                "in use",
                f"In use, with {amount}, by processes that the driver does not name. {_SHARING}",
                f"processes that the driver does not name, with {amount}",
                are_others=True,
            )
        return Holder("free", "free")

    def _strangers(self, reading: DeviceReading, ours: set[int]) -> list[tuple[GpuProcess, _ProcessOwner]]:
        """Return the processes on a GPU that do not belong to this user's clusters on the GPU, each with its
        owner.

        Args:
            reading: the state of the GPU.
            ours: the pids of these clusters' processes.
        """
        others = [process for process in reading.processes if not _belongs(process.pid, ours)]
        people = [(process, self._owner(process.pid)) for process in others]
        if ours and len(others) == len(reading.processes):
            # NVML lists no process of these clusters. In a container it lists them with the host's pids, so
            # the processes that are not visible here are theirs.
            people = [(process, person) for process, person in people if person is not None]
        unseen = _ProcessOwner("another process", "a process that cannot be seen from here", False)
        return [(process, person or unseen) for process, person in people]

    def _reserving(self, pid: int) -> list[tuple[GpuProcess, _ProcessOwner]]:
        """Return the process that has reserved a GPU, with its owner, if it belongs to another user. This
        user's reservations are already known from the registry."""
        person = self._owner(pid)
        return [] if person is None or person.is_this_user else [(GpuProcess(pid, None), person)]

    def _owner(self, pid: int) -> _ProcessOwner | None:
        """Return the owner of a process that computes on a GPU. None if the process has ended, is not visible
        here, or uses no GPU: in a container NVML gives the host's pids, which may be other processes' here.
        Owners are cached by pid and start time, because a pid may be reused."""
        try:
            process = psutil.Process(pid)
            key = (pid, process.create_time())
            if key not in self._owners:
                self._owners[key] = _find_owner(process)
            return self._owners[key]
        except psutil.Error:
            return None  # the process has ended, or belongs to another container


def listed(names: Sequence[str]) -> str:
    """Return the distinct names as text, at most three of them, and the number of the others."""
    distinct = list(dict.fromkeys(names))
    rest = len(distinct) - _MAX_NAMED
    return ", ".join(distinct[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def notebook(entry: ClusterEntry) -> str:
    """Return the name of a cluster's notebook without its folder."""
    return Path(entry.notebook).name


def _describe_use(strangers: Sequence[tuple[GpuProcess, _ProcessOwner]]) -> str:
    """Return a sentence on who uses a GPU, and with how much memory."""
    amount_bytes = sum(process.used_bytes or 0 for process, _ in strangers)
    amount = f", with {in_words(amount_bytes)}," if amount_bytes else ""
    return f"In use{amount} by {listed([person.sentence for _, person in strangers])}."


def _belong_to_others(strangers: Iterable[tuple[GpuProcess, _ProcessOwner]]) -> bool:
    return not all(person.is_this_user for _, person in strangers)


def _details(strangers: Sequence[tuple[GpuProcess, _ProcessOwner]]) -> str:
    """Return who uses a GPU, since when, and with how much memory: 'user ada (process 12, python) since 14:02
    on 03 June with 60.1 GiB'."""
    return listed(
        [
            person.sentence
            + ("" if person.since_s is None else f" since {_moment(person.since_s)}")
            + (f" with {in_words(process.used_bytes)}" if process.used_bytes else "")
            for process, person in strangers
        ]
    )


def _moment(at_s: float) -> str:
    return time.strftime("%H:%M on %d %B", time.localtime(at_s))


def _advice(strangers: Sequence[tuple[GpuProcess, _ProcessOwner]]) -> str:
    """Return a sentence on what a person can do to use a GPU that these processes use."""
    if _belong_to_others(strangers):
        return _SHARING
    is_this_kernel = all(process.pid == os.getpid() for process, _ in strangers)
    return f"{'Restart the kernel' if is_this_kernel else 'End it'}, or share the GPU's memory and time."


def _clusters(reading: DeviceReading, holding: Sequence[ClusterEntry]) -> Holder:
    """Return the holder of a GPU that one or more of this user's clusters have."""
    others = [entry for entry in holding if entry.owner.pid != os.getpid()]
    if not others:
        return Holder(
            "this notebook",
            f"this notebook ({_ranks_on(holding[0], reading)})",
            in_detail="this notebook's own cluster. To end that: %nbgpu stop",
        )
    named = listed([f"{notebook(entry)} ({_ranks_on(entry, reading)})" for entry in holding])
    ids = " ".join(entry.id for entry in others)
    states = {entry.state() for entry in holding}
    if states == {"left over"}:
        why = f"Left over by {named}, whose kernel is gone. To free it: nbgpu stop {ids}"
    elif states == {"kept"}:
        why = (
            f"Kept for {named}, whose kernel is gone. To go on with it: nbgpu.attach({others[0].id!r}); to free it: "
            f"nbgpu stop {ids}"
        )
    else:
        why = f"Your cluster of {named} has it. To end that: nbgpu stop {ids}"
    detail = ", ".join(
        f"your cluster of {notebook(entry)} (cluster {entry.id}, process {entry.owner.pid}) since "
        f"{_moment(entry.started_s)}"
        for entry in others
    )
    return Holder("yours", named, why, f"{detail}. To end that: nbgpu stop {ids}")


def _ranks_on(entry: ClusterEntry, reading: DeviceReading) -> str:
    """Return the ranks of a cluster on a GPU as text, such as 'rank 1'."""
    ranks = entry.ranks_on(reading.device.uuid)
    return named_ranks(ranks) if ranks else f"cluster {entry.id}"


def _belongs(pid: int, ours: set[int]) -> bool:
    """Return whether a process is one of these or descends from one."""
    if pid in ours or not ours:
        return pid in ours
    try:
        return any(parent.pid in ours for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False  # the process has ended, or belongs to another container


def _find_owner(process: psutil.Process) -> _ProcessOwner | None:
    """Return the owner of a process that computes on a GPU; None for another process, which only has the pid
    that a GPU's process has on the host."""
    since_s = process.create_time()
    if process.uids().real != os.getuid():
        words = f"user {process.username()}"
        return _ProcessOwner(words, f"{words} (process {process.pid}, {process.name()})", False, since_s)
    if not processes.has_open(process.pid, DRIVER_FILES):
        return None
    if process.pid == os.getpid():
        return _ProcessOwner("this notebook itself", "this notebook's own process", True, since_s)
    if path := process.environ().get("JPY_SESSION_NAME"):
        name = Path(path).name
        return _ProcessOwner(name, f"your notebook {name} (process {process.pid})", True, since_s)
    sentence = f"your process {process.pid} ({process.name()})"
    return _ProcessOwner(f"your {process.name()}", sentence, True, since_s)
