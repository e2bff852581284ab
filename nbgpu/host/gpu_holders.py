"""Find who has a GPU, and which are free, for the cards of the devices and for clusters that take free GPUs.

Two sources tell: the registry, which knows this user's clusters by notebook, also while they compute nothing,
and NVML, which knows the processes of everybody. In a container NVML may give the numbers that processes have
on the host, which mean nothing here, or another process; so a process counts as seen only where /proc agrees.
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
"""The beginning of the names of the files that every process has open that computes on a GPU."""
_IDLE_BYTES = 2**30
"""A GPU with more memory in use than this is in use, also where NVML names no process. The driver takes less,
and what a desktop takes is not counted."""
_MAX_NAMED = 3
_SHARING = "You would share its memory and its time."


class ClusterEntry(Protocol):
    """One of this user's clusters: the fields of its registry entry that are needed here."""

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
    """A few words: 'free', 'train.ipynb (rank 0)', 'user ada'."""
    why: str = ""
    """A sentence about a GPU that is not free, with what to do."""
    in_detail: str = ""
    """The holder of a GPU that is not free, with the time since when and the memory."""
    are_others: bool = False
    """Whether other people are, or may be, among those who have it."""

    @property
    def is_free(self) -> bool:
        """Whether nobody has the GPU. The cards, the control panel and the clusters all go by this."""
        return self.state == "free"


@dataclass(frozen=True, slots=True)
class _ProcessOwner:
    """The owner of a process, as cards and messages describe it."""

    words: str
    """The owner in the head of a card, such as 'user ada'."""
    sentence: str
    """The owner within a sentence, with the process where it can be seen: 'your process 12 (python)'."""
    is_this_user: bool
    since_s: float | None = None
    """When the process began; None for one that cannot be seen."""


class Holders:
    """Finds the holders of GPUs, and remembers whose each process is."""

    def __init__(self) -> None:
        self._people: dict[tuple[int, float], _ProcessOwner | None] = {}
        """The owner of each process, by pid and start; None for a process that cannot be seen from here."""

    def of(
        self, reading: DeviceReading, clusters: Sequence[ClusterEntry], reserved_by: int | None = None
    ) -> Holder:
        """The holder of a GPU.

        Args:
            reading: the GPU as it was read.
            clusters: all clusters of this user.
            reserved_by: the process that has the GPU for a cluster of anybody; None where there is none.
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
        # A reservation adds nothing where NVML names a process of somebody else.
        if reserved_by is not None and not _belong_to_others(strangers):
            strangers += self._reserving(reserved_by)
        also = _describe_use(strangers)
        if holding:
            holder = _clusters(reading, holding)
            if not strangers:
                return holder
            names = listed([person.words for _, person in strangers])
            return Holder(
                holder.state,
                f"{holder.words}, {names}",
                f"{holder.why} {also}".strip(),
                f"{holder.in_detail}; {_details(strangers)}",
                _belong_to_others(strangers),
            )
        if strangers:
            names = listed([person.words for _, person in strangers])
            return Holder(
                "others",
                names,
                f"{also} {_advice(strangers)}",
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
        """Return the processes on a GPU that do not belong to the clusters that have it, each with its owner.

        Args:
            reading: what NVML says of the GPU.
            ours: the pids of these clusters' processes.
        """
        others = [process for process in reading.processes if not _belongs(process.pid, ours)]
        people = [(process, self._person(process.pid)) for process in others]
        if ours and len(others) == len(reading.processes):
            # NVML names no process of the clusters that have the GPU. Then those that cannot be seen are
            # theirs, with the numbers that they have on the host.
            people = [(process, person) for process, person in people if person is not None]
        unseen = _ProcessOwner("another process", "a process that cannot be seen from here", False)
        return [(process, person or unseen) for process, person in people]

    def _reserving(self, pid: int) -> list[tuple[GpuProcess, _ProcessOwner]]:
        """Another user's process that has reserved a GPU. Those of this user are known from the registry."""
        person = self._person(pid)
        return [] if person is None or person.is_this_user else [(GpuProcess(pid, None), person)]

    def _person(self, pid: int) -> _ProcessOwner | None:
        """Return the owner of a process; None if the process has ended or cannot be seen from here. Owners
        are remembered by pid and start time, because a pid may be given to another process."""
        try:
            process = psutil.Process(pid)
            key = (pid, process.create_time())
            if key not in self._people:
                self._people[key] = _person(process)
            return self._people[key]
        except psutil.Error:
            return None  # it has ended, or belongs to another container


def listed(names: Sequence[str]) -> str:
    """Different names, and how many more there are."""
    shown = list(dict.fromkeys(names))
    rest = len(shown) - _MAX_NAMED
    return ", ".join(shown[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def notebook(entry: ClusterEntry) -> str:
    """The name of a cluster's notebook without its folder."""
    return Path(entry.notebook).name


def _describe_use(strangers: Sequence[tuple[GpuProcess, _ProcessOwner]]) -> str:
    if not strangers:
        return ""
    amount_bytes = sum(process.used_bytes or 0 for process, _ in strangers)
    amount = f", with {in_words(amount_bytes)}," if amount_bytes else ""
    return f"In use{amount} by {listed([person.sentence for _, person in strangers])}."


def _belong_to_others(strangers: Iterable[tuple[GpuProcess, _ProcessOwner]]) -> bool:
    return not all(person.is_this_user for _, person in strangers)


def _details(strangers: Sequence[tuple[GpuProcess, _ProcessOwner]]) -> str:
    """Who has a GPU, since when, and with how much memory: 'user ada (process 12, python) since 14:02 on 03
    June with 60.1 GiB'."""
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
    if _belong_to_others(strangers):
        return _SHARING
    is_this_kernel = all(process.pid == os.getpid() for process, _ in strangers)
    return f"{'Restart the kernel' if is_this_kernel else 'End it'}, or share the GPU's memory and time."


def _clusters(reading: DeviceReading, holding: Sequence[ClusterEntry]) -> Holder:
    """The holder of a GPU that one or more of this user's clusters have taken."""
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
    """The ranks of a cluster on a GPU: 'rank 1'."""
    ranks = entry.ranks_on(reading.device.uuid)
    return named_ranks(ranks) if ranks else f"cluster {entry.id}"


def _belongs(pid: int, ours: set[int]) -> bool:
    """Whether a process is one of these or descends from one."""
    if pid in ours:
        return True
    if not ours:
        return False
    try:
        return any(parent.pid in ours for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False  # it has ended, or belongs to another container


def _person(process: psutil.Process) -> _ProcessOwner | None:
    """The owner of a process that computes on a GPU; None for a process that only has its number."""
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
