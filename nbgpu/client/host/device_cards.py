"""What a person needs to know of each device of this host before choosing it: how full it is, how busy, and
who has it.

The control panel, `nbgpu top`, `nbgpu doctor` and JupyterLab's sidebar all show these cards. Who has a GPU
follows from two sources: the registry, which knows this user's clusters by notebook, also while they compute
nothing, and NVML, which knows the processes of everybody.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import psutil

from nbgpu.client.host import host_checks, registry
from nbgpu.client.host.registry import AnyEntry
from nbgpu.machine.device_readings import DeviceMonitor, DeviceReading
from nbgpu.machine.devices import is_part
from nbgpu.text.ranks import named_ranks
from nbgpu.text.sizes import in_words

CardState = Literal["free", "this notebook", "yours", "others", "unreadable"]

DRIVER_FILES = "/dev/nvidia"
"""The beginning of the names of the files that every process has open that computes on a GPU."""
_IDLE_BYTES = 2**30
"""A GPU with more memory in use than this is in use, also where NVML names no process. The driver and a
desktop take less."""
_GIB = 2**30
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class DeviceCard:
    """One device at one moment, in numbers and words. None stands for what is not reported."""

    kind: Literal["gpu", "cpu"]
    uuid: str
    """The driver's name of the GPU; empty for the CPU, and for a GPU whose name cannot be read."""
    title: str
    """'GPU 3', 'MIG 1g.10gb' or 'CPU'."""
    name: str
    group: str
    """The split GPU above a part of it (MIG), such as 'GPU 1 NVIDIA A100'; empty for a whole device."""
    used_bytes: int | None
    total_bytes: int
    utilization_percent: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    neighbours: str
    """The nearest other GPUs in words; empty where none is near."""
    state: CardState
    holder: str
    """Who has the device, in a few words: 'free', 'train.ipynb', 'user ada'."""
    why: str
    """A sentence about a device that is not free, with what to do; empty for a free one."""

    @property
    def is_choosable(self) -> bool:
        """Whether a new cluster may take the device. GPUs of this user's other clusters are refused, and
        those of other people can be shared."""
        return self.state in ("free", "this notebook", "others")

    def memory_in_words(self) -> str:
        """'9.1 of 79.6 GiB'."""
        used = "?" if self.used_bytes is None else f"{self.used_bytes / _GIB:.1f}"
        return f"{used} of {self.total_bytes / _GIB:.1f} GiB"

    def load_in_words(self) -> str:
        """'37 % busy', or 'load not reported'."""
        percent = self.utilization_percent
        return "load not reported" if percent is None else f"{percent:.0f} % busy"

    def heat_in_words(self) -> str:
        """'41 °C, 180 of 700 W', without what is not known."""
        parts = []
        if self.temperature_c is not None:
            parts.append(f"{self.temperature_c:.0f} °C")
        if self.power_w is not None:
            limit = "" if self.power_limit_w is None else f" of {self.power_limit_w:.0f}"
            parts.append(f"{self.power_w:.0f}{limit} W")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The card for pages and scripts: every field, and what people read in words made here, so that they
        are the same everywhere. `widgets/src/device_cards.ts` has the same keys."""
        return {
            **asdict(self),
            "is_choosable": self.is_choosable,
            "memory": self.memory_in_words(),
            "load": self.load_in_words(),
            "heat": self.heat_in_words(),
        }


@dataclass(frozen=True, slots=True)
class HostDevices:
    """All devices of this host at one moment."""

    cards: tuple[DeviceCard, ...]
    """The GPUs in the driver's order, and last the CPU."""
    note: str = ""
    """A sentence about GPUs that are not among the cards, such as hidden ones; empty where there are none."""

    def as_json(self) -> dict[str, Any]:
        """The devices for pages and scripts."""
        return {"devices": [card.as_json() for card in self.cards], "note": self.note}

    def free_gpus(self) -> list[str]:
        """The UUIDs of the GPUs that nobody uses."""
        return [card.uuid for card in self.cards if card.uuid and card.state == "free"]


class DeviceCards:
    """Makes the cards of this host's devices, as often as they are asked for."""

    def __init__(self) -> None:
        self._monitor = DeviceMonitor()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the use of the driver. Harmless when repeated."""
        self._monitor.close()

    def read(self) -> HostDevices:
        """The devices as they are now.

        Raises:
            ClusterError: the folder of the registry cannot be used.
        """
        readings = self._monitor.read()
        clusters = registry.entries()
        return HostDevices(
            tuple(
                _gpu_card(reading, clusters)
                if reading.device.kind == "cuda"
                else _cpu_card(reading, clusters)
                for reading in readings
            )
        )


def _gpu_card(reading: DeviceReading, clusters: Sequence[AnyEntry]) -> DeviceCard:
    device = reading.device
    state, holder, why = _holder(reading, clusters)
    whole = f"GPU {device.index}"
    is_mig = is_part(device)
    return DeviceCard(
        kind="gpu",
        uuid=device.uuid,
        title=_profile(device.name) if is_mig else whole,
        name=device.name,
        group=f"{whole} {reading.whole_name}" if is_mig else "",
        used_bytes=reading.used_bytes,
        total_bytes=device.memory_bytes,
        utilization_percent=reading.utilization_percent,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        power_limit_w=reading.power_limit_w,
        neighbours=reading.neighbours,
        state=state,
        holder=holder,
        why=why,
    )


def _profile(name: str) -> str:
    """'MIG 1g.10gb' of the driver's 'NVIDIA A100-SXM4-80GB MIG 1g.10gb'."""
    _, separator, profile = name.partition(" MIG ")
    return f"MIG {profile}" if separator else name


def _cpu_card(reading: DeviceReading, clusters: Sequence[AnyEntry]) -> DeviceCard:
    device = reading.device
    cores, quota = len(os.sched_getaffinity(0)), host_checks.cpu_quota()
    limit_bytes = host_checks.memory_limit_bytes()
    name = f"{device.name}, {cores} core{'s' if cores != 1 else ''}"
    if quota is not None and quota < cores:
        name += f" and the time of {quota:g}"
    if limit_bytes is not None and limit_bytes < device.memory_bytes:
        name += f"; this container may take {in_words(limit_bytes)}"
    ranks = [
        f"{_notebook(entry)} ({named_ranks(ranks)})"
        for entry in clusters
        if (ranks := [rank for rank, name in enumerate(entry.device_names()) if name == "CPU"])
    ]
    return DeviceCard(
        kind="cpu",
        uuid="",
        title="CPU",
        name=name,
        group="",
        used_bytes=reading.used_bytes,
        total_bytes=device.memory_bytes,
        utilization_percent=reading.utilization_percent,
        temperature_c=None,
        power_w=None,
        power_limit_w=None,
        neighbours="",
        state="free",
        holder=_listed(ranks) or "no ranks of yours",
        why="",
    )


def _holder(reading: DeviceReading, clusters: Sequence[AnyEntry]) -> tuple[CardState, str, str]:
    """(state, holder in a few words, sentence) of a GPU."""
    if reading.problem:
        return (
            "unreadable",
            "cannot be read",
            f"The driver cannot read it: {reading.problem}. nvidia-smi may say more; a GPU that is lost comes back "
            "with a reboot.",
        )
    holding = [entry for entry in clusters if reading.device.uuid in entry.gpus()]
    ours = {
        process.pid for entry in holding for process in [*entry.engines.values(), *entry.leaders.values()]
    }
    strangers = [process for process in reading.processes if not _belongs(process.pid, ours)]
    people = dict.fromkeys(_person(process.pid) for process in strangers)
    names = _listed([who for who, _ in people])
    amount_bytes = sum(process.used_bytes or 0 for process in strangers)
    also = f"In use by {names}{f' with {in_words(amount_bytes)}' if amount_bytes else ''}."
    if holding:
        state, holder, why = _of_clusters(reading, holding)
        return (state, f"{holder}, {names}", f"{why} {also}".strip()) if strangers else (state, holder, why)
    if strangers:
        is_all_own = all(is_own for _, is_own in people)
        advice = "End it to have the GPU alone" if is_all_own else "Choose another GPU, or share this one"
        return "others", names, f"{also} {advice}: its memory and its time are shared."
    if reading.used_bytes is not None and reading.used_bytes > _IDLE_BYTES:
        amount = in_words(reading.used_bytes)
        return (
            "others",
            "in use",
            f"{amount} are in use by processes that cannot be seen from here, such as those of another container. "
            "Choose another GPU, or share this one: its memory and its time are shared.",
        )
    return "free", "free", ""


def _of_clusters(reading: DeviceReading, holding: Sequence[AnyEntry]) -> tuple[CardState, str, str]:
    """The holder of a GPU that one or more of this user's clusters have taken."""
    named = [f"{_notebook(entry)} ({_ranks_on(entry, reading)})" for entry in holding]
    if all(entry.owner.pid == os.getpid() for entry in holding):
        return "this notebook", f"this notebook, {_ranks_on(holding[0], reading)}", ""
    ids = " ".join(entry.id for entry in holding if entry.owner.pid != os.getpid())
    states = {entry.state() for entry in holding}
    if states == {"left over"}:
        why = f"Left over by {_listed(named)}, whose kernel is gone. To free it: nbgpu stop {ids}"
    elif states == {"kept"}:
        why = (
            f"Kept for {_listed(named)}, whose kernel is gone. To go on with it: nbgpu.attach({ids.split()[0]!r}); "
            f"to free it: nbgpu stop {ids}"
        )
    else:
        why = f"Your cluster of {_listed(named)} has it. To end that: nbgpu stop {ids}"
    return "yours", _listed(named), why


def _ranks_on(entry: AnyEntry, reading: DeviceReading) -> str:
    """The ranks of a cluster on a GPU: 'rank 1'."""
    if isinstance(entry, registry.Entry):
        return named_ranks(
            rank for rank, device in enumerate(entry.devices) if device.uuid == reading.device.uuid
        )
    return f"cluster {entry.id}"


def _notebook(entry: AnyEntry) -> str:
    return Path(entry.notebook).name


def _belongs(pid: int, ours: set[int]) -> bool:
    """Whether a process is one of these or descends from one."""
    if pid in ours:
        return True
    try:
        return any(parent.pid in ours for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False  # it has ended, or belongs to another container


def _person(pid: int) -> tuple[str, bool]:
    """(the owner of a process that computes on a GPU in words, whether that is this user)."""
    try:
        process = psutil.Process(pid)
        user_id = process.uids().real
        if user_id != os.getuid():
            return f"user {process.username()}", False
        # In a container NVML may give the host's numbers, which mean other processes here.
        if not _has_gpu_open(pid):
            return "a process outside this container", False
        notebook = process.environ().get("JPY_SESSION_NAME")
        if pid == os.getpid():
            return "this notebook's own process", True
        if notebook:
            return f"your notebook {Path(notebook).name} (process {pid})", True
        return f"your process {pid} ({process.name()})", True
    except psutil.Error:
        return "a process outside this container", False


def _has_gpu_open(pid: int) -> bool:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    return any(_target(link).startswith(DRIVER_FILES) for link in links)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # the file was closed in the meantime


def _listed(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    rest = len(shown) - _MAX_NAMED
    return ", ".join(shown[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
