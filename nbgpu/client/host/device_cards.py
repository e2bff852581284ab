"""Cards that describe the devices of this host: the memory and load of each, and who uses it.

The control panel, `nbgpu top`, `nbgpu doctor` and JupyterLab's sidebar show these cards.
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
    """One device at one moment, in numbers and words. None stands for a value that the driver does not
    report."""

    kind: Literal["gpu", "cpu"]
    uuid: str = ""
    """The GPU's UUID; empty for the CPU, and for a GPU whose UUID cannot be read."""
    title: str
    """'GPU 3', 'MIG 1g.10gb device 0' or 'CPU'."""
    name: str
    group: str = ""
    """The GPU to which a MIG device belongs, such as 'GPU 1 NVIDIA A100'; empty for a whole device."""
    used_bytes: int | None
    total_bytes: int
    utilization_percent: float | None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    neighbours: str = ""
    """The GPUs with the fastest connection to this one, in words; empty if there are none."""
    state: State
    holder: str
    """Who uses the device, in a few words: 'free', 'train.ipynb', 'user ada'."""
    why: str = ""
    """A sentence that says who uses the device, and what to do; empty for a free one."""

    @property
    def is_choosable(self) -> bool:
        """Whether a person may choose the device for a new cluster. GPUs that other users have can be shared,
        but not those of this user's other clusters."""
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
        """'41 °C, 180 of 700 W', without the values that are not reported."""
        parts = []
        if self.temperature_c is not None:
            parts.append(f"{self.temperature_c:.0f} °C")
        if self.power_w is not None:
            limit = "" if self.power_limit_w is None else f" of {self.power_limit_w:.0f}"
            parts.append(f"{self.power_w:.0f}{limit} W")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The card as JSON values, for pages and scripts: every field, and the texts for people, which are
        the same everywhere because they are made here. `widgets/src/device_cards.ts` has the same keys."""
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
    """The GPUs in the driver's order, then the CPU."""
    note: str = ""
    """Sentences about GPUs without cards, such as hidden ones, and about what cannot be read; or empty."""

    proposed: tuple[str, ...] = ()
    """The UUIDs of the GPUs that are proposed for a new cluster."""

    def as_json(self) -> dict[str, Any]:
        """The devices as JSON values, for pages and scripts."""
        return {
            "devices": [card.as_json() for card in self.cards],
            "note": self.note,
            "proposed": list(self.proposed),
        }

    def uses(self) -> dict[str, str]:
        """For each GPU that is not free, by its UUID, the sentence that says who uses it."""
        return {card.uuid: card.why for card in self.cards if card.uuid and card.why}


class DeviceCards:
    """Reads the devices of this host repeatedly, and makes their cards."""

    def __init__(self) -> None:
        self._gpus = GpuChooser()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the driver until the next reading. A second call does nothing."""
        self._gpus.close()

    def read(self) -> HostDevices:
        """Return the devices as they are now. The cards and the note say what could not be read."""
        reading = self._gpus.read_host()
        notes = _reading_notes(reading)
        try:
            clusters = registry.entries()
        except ClusterError as error:
            clusters = []
            notes.append(f"Which of your clusters has which GPU is not known: {error}.")
        held = self._gpus.held(reading, clusters)
        cards = (
            *map(_gpu_card, held),
            *(_cpu_card(cpu, clusters) for cpu in reading.devices if cpu.device.kind == "cpu"),
        )
        proposed: list[str] = []
        try:
            site_default = site_file.read().defaults.get("gpus", "")
            limit = site.most_gpus()
            # The GPUs that this user's clusters have count against the site's limit.
            num_allowed = None if limit is None else max(0, limit - len(registry.gpus_here(clusters)))
            proposed = self._gpus.propose(held, site_default, num_allowed)
        except ConfigError as error:
            notes.append(f"No GPU is chosen yet: {error}.")
        return HostDevices(cards, " ".join(notes), tuple(proposed))


def _gpu_card(gpu: HeldGpu) -> DeviceCard:
    """Make the card of a GPU or of a MIG device."""
    reading, holder = gpu.reading, gpu.holder
    device, is_mig = reading.device, reading.part is not None
    gpu_title = f"GPU {device.index}"
    return DeviceCard(
        kind="gpu",
        uuid=device.uuid,
        title=f"{_mig_profile(device.name)} device {reading.part}" if is_mig else gpu_title,
        name=device.name,
        group=f"{gpu_title} {reading.whole_name}" if is_mig else "",
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


def _reading_notes(reading: HostReading) -> list[str]:
    """Sentences about hidden GPUs, and about an error of the driver."""
    notes = []
    if reading.num_hidden:
        number = f"{reading.num_hidden} GPU{'s' if reading.num_hidden != 1 else ''}"
        notes.append(f"{reading.hidden_by} hides {number} of this machine.")
    if reading.problem:
        notes.append(
            f"No GPU can be used, because NVIDIA's driver answers: {reading.problem}. nvidia-smi may say more; after an "
            "update of the driver the machine needs a reboot."
        )
    return notes


def _mig_profile(name: str) -> str:
    """'MIG 1g.10gb' for the driver's 'NVIDIA A100-SXM4-80GB MIG 1g.10gb'."""
    _, separator, profile = name.partition(" MIG ")
    return f"MIG {profile}" if separator else name


def _cpu_card(reading: DeviceReading, clusters: Sequence[AnyEntry]) -> DeviceCard:
    """Make the card of the CPU. Its name has the number of cores, and the limits of the control group if the
    host has more. Any number of clusters may have ranks on the CPU, so it counts as free."""
    device = reading.device
    cores, quota = len(os.sched_getaffinity(0)), cgroups.cpu_quota()
    limit_bytes = cgroups.memory_limit_bytes()
    name = f"{device.name}, {cores} core{'s' if cores != 1 else ''}"
    if quota is not None and quota < cores:
        name += f" and the time of {quota:g}"
    if limit_bytes is not None and limit_bytes < device.memory_bytes:
        name += f"; this container may take {in_words(limit_bytes)}"
    holders, is_mine = [], False
    for entry in clusters:
        if ranks := [rank for rank, device_name in enumerate(entry.device_names()) if device_name == "CPU"]:
            is_own = entry.owner.pid == os.getpid()
            holders.append(f"{'this notebook' if is_own else notebook(entry)} ({named_ranks(ranks)})")
            is_mine = is_mine or is_own
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
