"""Choose GPUs that nobody uses, for `gpus='auto'` and `gpus='free:N'`.

Both this choice and the cards of the devices use `gpu_holders` to decide which GPUs are free, so that a
cluster takes the GPUs that the control panel shows as free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import combinations
from typing import NoReturn

from nbgpu.errors import ConfigError, NoFreeGpuError
from nbgpu.host.gpu_holders import ClusterEntry, Holder, Holders
from nbgpu.machine import devices
from nbgpu.machine.gpus import reservations
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.machine.gpus.readings import DeviceMonitor, DeviceReading, HostReading
from nbgpu.protocol.records import Device
from nbgpu.text.sizes import in_words

_MAX_TRIED = 20_000
"""The largest number of groups of GPUs that are compared by their links. To choose eight of sixteen GPUs
there are 12,870 groups. Only parts of GPUs (MIG) can be more, and these have no links."""


@dataclass(frozen=True, slots=True)
class HeldGpu:
    """The state of a GPU, and its holder."""

    reading: DeviceReading
    holder: Holder

    @property
    def device(self) -> Device:
        return self.reading.device

    @property
    def free_bytes(self) -> int:
        return self.device.memory_bytes - (self.reading.used_bytes or 0)

    def describe(self) -> str:
        """Return the holder of the GPU, and how much of its memory is left, as text."""
        left = f"{in_words(self.free_bytes)} of {in_words(self.device.memory_bytes)} left"
        return f"{self.device.label()}: {self.holder.in_detail}; {left}"


class GpuChooser:
    """Chooses GPUs for clusters. NVML stays initialized until `close`."""

    def __init__(self) -> None:
        self._monitor = DeviceMonitor()
        self._holders = Holders()
        self._proposed: list[str] = []

    def close(self) -> None:
        """Shut NVML down. May be called repeatedly."""
        self._monitor.close()

    def read(self, clusters: Sequence[ClusterEntry]) -> list[HeldGpu]:
        """Return the present state and holder of each visible GPU.

        Args:
            clusters: all clusters of this user on this host.
        """
        return self.held(self._monitor.read(), clusters)

    def read_host(self) -> HostReading:
        """Return the present state of all devices."""
        return self._monitor.read()

    def held(self, reading: HostReading, clusters: Sequence[ClusterEntry]) -> list[HeldGpu]:
        """Return the GPUs of a reading, each with its holder."""
        gpus = [gpu for gpu in reading.devices if gpu.device.kind == "cuda"]
        reserved = reservations.holders() if gpus else {}
        return [HeldGpu(gpu, self._holders.of(gpu, clusters, reserved.get(gpu.device.uuid))) for gpu in gpus]

    def propose(self, held: Sequence[HeldGpu], gpus: str, most: int | None = None) -> list[str]:
        """Return the UUIDs of the GPUs that the control panel preselects: those of the setting; for an empty
        setting all free GPUs, or a single free one if other people use the host.

        Args:
            held: the present state and holder of each GPU.
            gpus: the value of the setting `gpus`; empty if it was not given.
            most: the largest number of GPUs; None for any number.
        """
        free = [gpu for gpu in held if gpu.holder.is_free]
        if gpus == gpus_setting.ALL:
            chosen = [gpu.device.uuid for gpu in held if not gpu.reading.problem]
        elif gpus and not gpus_setting.takes_free(gpus):
            named = {device.uuid for device in devices.choose(gpus, None)}
            chosen = [gpu.device.uuid for gpu in held if gpu.device.uuid in named]
        else:
            is_shared = any(gpu.holder.are_others for gpu in held)
            number = gpus_setting.num_free(gpus) or (1 if is_shared and not gpus else len(free))
            number = min(number, len(free), len(free) if most is None else most)
            # A previous proposal is kept, so that it does not change with a few MiB of used memory.
            if len(self._proposed) == number and set(self._proposed) <= {gpu.device.uuid for gpu in free}:
                return self._proposed
            chosen = [gpu.device.uuid for gpu in self.best(free, number)]
        self._proposed = chosen[:most]
        return self._proposed

    def choose(
        self,
        gpus: str,
        ranks: int | None,
        clusters: Sequence[ClusterEntry] = (),
        most: int | None = None,
        can_wait: bool = False,
    ) -> tuple[Device, ...]:
        """Return the device of every rank, in order of rank: free GPUs, or the CPU on a host without GPUs.

        Args:
            gpus: 'auto' or 'free:N'.
            ranks: the number of ranks; None for one on each GPU.
            clusters: all clusters of this user on this host.
            most: the largest number of GPUs that 'auto' takes if `ranks` is None; None for all free ones.
            can_wait: whether the message offers to wait.

        Raises:
            ConfigError: the host has fewer GPUs than requested, free or not.
            NoFreeGpuError: too few GPUs are free; the message names the holders of the others.
        """
        held = self.read(clusters)
        requested = gpus_setting.num_free(gpus)
        num_usable = sum(not gpu.reading.problem for gpu in held)
        if requested is not None:
            _require_present(gpus, requested, num_usable)
        if not held:
            return devices.one_for_each_rank((), ranks)
        free = [gpu for gpu in held if gpu.holder.is_free]
        # Without a number of GPUs or ranks, one free GPU is enough for a start.
        needed = requested or (min(ranks, num_usable) if ranks else 1)
        if len(free) < max(1, needed):
            self.refuse(f"gpus = {gpus!r}", needed, held, can_wait)
        number = needed if requested or ranks else min(len(free), most or len(free))
        return devices.one_for_each_rank([gpu.device for gpu in self.best(free, number)], ranks)

    def refuse(self, setting: str, needed: int, held: Sequence[HeldGpu], can_wait: bool = False) -> NoReturn:
        """Raise the error that too few of these GPUs are free, with the holders of the others and the
        person's options.

        Args:
            setting: the setting and its value.
            needed: the number of free GPUs that it needs.
            held: the GPUs.
            can_wait: whether to offer to wait.
        """
        raise NoFreeGpuError(_too_few(setting, needed, held, can_wait))

    def best(self, gpus: Sequence[HeldGpu], number: int, beside: Sequence[HeldGpu] = ()) -> list[HeldGpu]:
        """Return `number` of these GPUs, in the driver's order: the group with the best links, and among
        equally good groups the one with the most free memory.

        Args:
            gpus: the GPUs to choose from.
            number: the number of GPUs to return; all are returned if there are fewer.
            beside: GPUs that are already chosen, to which the others should have good links.
        """
        if number >= len(gpus):
            return list(gpus)
        costs = self._monitor.link_costs([gpu.device for gpu in [*gpus, *beside]])
        groups = list(combinations(gpus, number)) if math.comb(len(gpus), number) <= _MAX_TRIED else []
        if not groups:
            groups = [tuple(sorted(gpus, key=_free_gib, reverse=True)[:number])]
        best = min(groups, key=lambda group: (_link_costs(group, beside, costs), _negative_memory(group)))
        return [gpu for gpu in gpus if gpu in best]


def assumed(gpus: str, ranks: int | None) -> tuple[Device, ...]:
    """Return the device of every rank for a plan that starts nothing. Only if the number of ranks depends on
    the free GPUs, it is determined which GPUs are free; otherwise any of the host's GPUs are taken.

    Raises:
        ConfigError: a named GPU does not exist, or the host has fewer GPUs than requested.
    """
    if not gpus_setting.takes_free(gpus):
        return devices.choose(gpus, ranks)
    requested = gpus_setting.num_free(gpus)
    if ranks is None and requested is None:
        with closing(GpuChooser()) as chooser, suppress(NoFreeGpuError):
            return chooser.choose(gpus, None)
    present = devices.inventory()
    if requested is not None:
        _require_present(gpus, requested, len(present))
    return devices.one_for_each_rank(present[:requested], ranks)


def _require_present(gpus: str, requested: int, num_present: int) -> None:
    """Raise a ConfigError if the host has fewer GPUs than requested."""
    if requested > num_present:
        are = (
            "no GPU is" if num_present == 0 else f"{num_present} GPU{' is' if num_present == 1 else 's are'}"
        )
        fewer = "Take CPU ranks with 'none'" if num_present == 0 else f"Take 'free:{num_present}', or fewer"
        raise ConfigError(f"gpus = {gpus!r}: {are} visible here. {fewer}")


def _link_costs(
    group: Sequence[HeldGpu], beside: Sequence[HeldGpu], costs: Mapping[frozenset[str], int]
) -> tuple[int, int]:
    """Return the costs by which groups of GPUs are compared: that of the worst link, and then the sum."""
    pairs = combinations([*group, *beside], 2)
    link_costs = [costs.get(frozenset((one.device.uuid, other.device.uuid)), 0) for one, other in pairs]
    return max(link_costs, default=0), sum(link_costs)


def _free_gib(gpu: HeldGpu) -> int:
    """Return the free memory in whole GiB. Differences of a few MiB, which change from moment to moment, must
    not affect the choice."""
    return gpu.free_bytes >> 30


def _negative_memory(group: Sequence[HeldGpu]) -> tuple[int, int]:
    """Return the smallest and the total free memory of a group in GiB, negated, so that `min` prefers
    more."""
    free = [_free_gib(gpu) for gpu in group]
    return -min(free), -sum(free)


def _too_few(setting: str, needed: int, held: Sequence[HeldGpu], can_wait: bool) -> str:
    """Return the message of a NoFreeGpuError: how many GPUs are free, the holders of the others, and in the
    last line the person's options."""
    free = [gpu for gpu in held if gpu.holder.is_free]
    taken = [gpu for gpu in held if not gpu.holder.is_free]
    total = f"{len(held)} GPU{'s' if len(held) > 1 else ''}"
    are_free = f"{len(free) or 'none'} of {total} {'are' if len(free) > 1 else 'is'} free"
    shortage = f", and {needed} are needed" if needed > 1 else ""
    shareable = [str(gpu.device.index) for gpu in taken if gpu.holder.state == "others"]
    offers = []
    if can_wait:
        offers.append("wait until there are as many: --wait (wait=True)")
    if free:
        offers.append(f"take what is free: --gpus free:{len(free)}")
    if shareable:
        offers.append(f"share the memory and time of one: --gpus {shareable[0]}, or of all: --gpus all")
    offers.append("take CPU ranks: --gpus none")
    return "\n".join(
        [
            f"{setting}: {are_free}{shortage}",
            *(gpu.describe() for gpu in taken),
            "You can " + "; ".join(offers),
        ]
    )
