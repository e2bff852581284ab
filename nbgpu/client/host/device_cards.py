"""Cards that tell a person about each device of this host: how full it is, how busy, and who has it.

The control panel, `nbgpu top`, `nbgpu doctor` and JupyterLab's sidebar all show these cards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from nbgpu.client.host import registry
from nbgpu.client.host.registry import AnyEntry
from nbgpu.config import site, site_file
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.host.free_gpus import GpuChooser, HeldGpu
from nbgpu.host.gpu_holders import State, listed, notebook
from nbgpu.machine import cgroups
from nbgpu.machine.gpus.readings import DeviceReading, HostReading
from nbgpu.text.ranks import named_ranks
from nbgpu.text.sizes import in_words

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCard:
    """One device at one moment, in numbers and words. None stands for what is not reported."""

    kind: Literal["gpu", "cpu"]
    uuid: str = ""
    """The driver's name of the GPU; empty for the CPU, and for a GPU whose name cannot be read."""
    title: str
    """'GPU 3', 'MIG 1g.10gb device 0' or 'CPU'."""
    name: str
    group: str = ""
    """The split GPU above a part of it (MIG), such as 'GPU 1 NVIDIA A100'; empty for a whole device."""
    used_bytes: int | None
    total_bytes: int
    utilization_percent: float | None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    neighbours: str = ""
    """The nearest other GPUs in words; empty where none is near."""
    state: State
    holder: str
    """Who has the device, in a few words: 'free', 'train.ipynb', 'user ada'."""
    why: str = ""
    """A sentence about a device that is not free, with what to do; empty for a free one."""

    @property
    def is_choosable(self) -> bool:
        """Whether a new cluster may take the device. GPUs of this user's other clusters are refused, and
        those of other people can be shared."""
        return self.state in ("free", "this notebook", "others")

    def memory_in_words(self) -> str:
        """'9.1 of 79.6 GiB', or 'not reported'."""
        if not self.total_bytes:
            return "not reported"
        used = "?" if self.used_bytes is None else f"{self.used_bytes / _GIB:.1f}"
        return f"{used} of {self.total_bytes / _GIB:.1f} GiB"

    def load_in_words(self) -> str:
        """'37 % busy', or 'not reported'."""
        percent = self.utilization_percent
        return "not reported" if percent is None else f"{percent:.0f} % busy"

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

    proposed: tuple[str, ...] = ()
    """The UUIDs of the GPUs that a new cluster is offered before a person has chosen any."""

    def as_json(self) -> dict[str, Any]:
        """The devices for pages and scripts."""
        return {
            "devices": [card.as_json() for card in self.cards],
            "note": self.note,
            "proposed": list(self.proposed),
        }

    def uses(self) -> dict[str, str]:
        """Return by UUID, for each GPU that is not free, the sentence that says who has it."""
        return {card.uuid: card.why for card in self.cards if card.uuid and card.why}

    def free_gpus(self) -> list[str]:
        """The UUIDs of the GPUs that nobody uses."""
        return [card.uuid for card in self.cards if card.uuid and card.state == "free"]


class DeviceCards:
    """Makes the cards of this host's devices, as often as they are asked for."""

    def __init__(self) -> None:
        self._gpus = GpuChooser()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the use of the driver, until the next reading. Harmless when repeated."""
        self._gpus.close()

    def read(self) -> HostDevices:
        """The devices as they are now. What cannot be read is said in the cards and the note."""
        reading = self._gpus.read_host()
        notes = [*_hidden(reading), *_driver_problem(reading)]
        try:
            clusters = registry.entries()
        except ClusterError as error:
            clusters = []
            notes.append(f"Which of your clusters has which GPU is not known: {error}.")
        held = self._gpus.held(reading, clusters)
        cards = (
            *map(_gpu_card, held),
            *(_cpu_card(each, clusters) for each in reading.devices if each.device.kind == "cpu"),
        )
        proposed: list[str] = []
        try:
            found = site_file.read()
            most = site.most_gpus()
            # The GPUs that this user's clusters have count against the site's limit.
            left = None if most is None else max(0, most - len(registry.gpus_here(clusters)))
            proposed = self._gpus.propose(held, found.defaults.get("gpus", ""), left)
        except ConfigError as error:
            notes.append(f"No GPU is chosen yet: {error}.")
        return HostDevices(cards, " ".join(notes), tuple(proposed))


def _gpu_card(gpu: HeldGpu) -> DeviceCard:
    """Make the card of a GPU, or of a part of a split GPU (MIG), from its reading and its holder."""
    reading, holder = gpu.reading, gpu.holder
    device, whole = reading.device, f"GPU {reading.device.index}"
    return DeviceCard(
        kind="gpu",
        uuid=device.uuid,
        title=whole if reading.part is None else f"{_profile(device.name)} device {reading.part}",
        name=device.name,
        group="" if reading.part is None else f"{whole} {reading.whole_name}",
        used_bytes=reading.used_bytes,
        total_bytes=device.memory_bytes,
        utilization_percent=reading.utilization_percent,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        power_limit_w=reading.power_limit_w,
        neighbours=reading.neighbours,
        state=holder.state,
        holder=holder.words,
        why=holder.why,
    )


def _hidden(reading: HostReading) -> list[str]:
    if not reading.num_hidden:
        return []
    number = f"{reading.num_hidden} GPU{'s' if reading.num_hidden != 1 else ''}"
    return [f"{reading.hidden_by} hides {number} of this machine."]


def _driver_problem(reading: HostReading) -> list[str]:
    if not reading.problem:
        return []
    return [
        f"No GPU can be used, because NVIDIA's driver answers: {reading.problem}. nvidia-smi may say more; after an "
        "update of the driver the machine needs a reboot."
    ]


def _profile(name: str) -> str:
    """'MIG 1g.10gb' of the driver's 'NVIDIA A100-SXM4-80GB MIG 1g.10gb'."""
    _, separator, profile = name.partition(" MIG ")
    return f"MIG {profile}" if separator else name


def _cpu_card(reading: DeviceReading, clusters: Sequence[AnyEntry]) -> DeviceCard:
    """Make the card of the CPU. The name has the cores, and the limits of the control group if these are
    lower than what the host has. Any number of clusters may have ranks on the CPU, so it is never taken."""
    device = reading.device
    cores, quota = len(os.sched_getaffinity(0)), cgroups.cpu_quota()
    limit_bytes = cgroups.memory_limit_bytes()
    name = f"{device.name}, {cores} core{'s' if cores != 1 else ''}"
    if quota is not None and quota < cores:
        name += f" and the time of {quota:g}"
    if limit_bytes is not None and limit_bytes < device.memory_bytes:
        name += f"; this container may take {in_words(limit_bytes)}"
    with_ranks = [
        (entry, ranks)
        for entry in clusters
        if (ranks := [rank for rank, name in enumerate(entry.device_names()) if name == "CPU"])
    ]
    is_mine = any(entry.owner.pid == os.getpid() for entry, _ in with_ranks)
    holders = [
        f"{'this notebook' if entry.owner.pid == os.getpid() else notebook(entry)} ({named_ranks(ranks)})"
        for entry, ranks in with_ranks
    ]
    return DeviceCard(
        kind="cpu",
        title="CPU",
        name=name,
        used_bytes=reading.used_bytes,
        total_bytes=device.memory_bytes,
        utilization_percent=reading.utilization_percent,
        state="this notebook" if is_mine else "free",
        holder=listed(holders) or "no ranks of yours",
    )
