"""Choose GPUs that nobody uses, for `gpus='auto'` and `gpus='free:N'`.

`gpu_holders` decides which GPUs are free, for the choice as for the cards of the devices, so that a cluster
takes what the control panel shows as free.
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
"""The most groups of GPUs that are compared. Eight of sixteen GPUs are 12,870 groups, and only parts of GPUs
(MIG) are more; they have no links to compare."""


@dataclass(frozen=True, slots=True)
class HeldGpu:
    """A GPU, as it was read, and who has it."""

    reading: DeviceReading
    holder: Holder

    @property
    def device(self) -> Device:
        return self.reading.device

    @property
    def free_bytes(self) -> int:
        return self.device.memory_bytes - (self.reading.used_bytes or 0)

    def describe(self) -> str:
        """Return who has the GPU, and how much of its memory is left, in words."""
        left = f"{in_words(self.free_bytes)} of {in_words(self.device.memory_bytes)} left"
        return f"{self.device.label()}: {self.holder.in_detail}; {left}"


class GpuChooser:
    """Chooses GPUs for a cluster, as often as is asked. NVML stays in use until `close`."""

    def __init__(self) -> None:
        self._monitor = DeviceMonitor()
        self._holders = Holders()
        self._proposed: list[str] = []

    def close(self) -> None:
        """End the use of NVML. Harmless when repeated."""
        self._monitor.close()

    def read(self, clusters: Sequence[ClusterEntry]) -> list[HeldGpu]:
        """The GPUs that are visible, as they are now.

        Args:
            clusters: all clusters of this user on this host.
        """
        return self.held(self._monitor.read(), clusters)

    def read_host(self) -> HostReading:
        """The state of all devices."""
        return self._monitor.read()

    def held(self, reading: HostReading, clusters: Sequence[ClusterEntry]) -> list[HeldGpu]:
        """The GPUs of a reading, each with who has it."""
        gpus = [each for each in reading.devices if each.device.kind == "cuda"]
        reserved = reservations.holders() if gpus else {}
        return [
            HeldGpu(each, self._holders.of(each, clusters, reserved.get(each.device.uuid))) for each in gpus
        ]

    def propose(self, held: Sequence[HeldGpu], gpus: str, most: int | None = None) -> list[str]:
        """Return the UUIDs of the GPUs that a person is offered before any choice: those of the setting; if
        the setting is empty, all free ones, or a single free one if other people use the machine.

        Args:
            held: the GPUs as they are now.
            gpus: the value of the setting `gpus`; empty where nobody has given one.
            most: how many GPUs at most; None for any number.
        """
        free = [gpu for gpu in held if gpu.holder.is_free]
        if gpus == gpus_setting.ALL:
            found = [gpu.device.uuid for gpu in held if not gpu.reading.problem]
        elif gpus and not gpus_setting.takes_free(gpus):
            named = {device.uuid for device in devices.choose(gpus, None)}
            found = [gpu.device.uuid for gpu in held if gpu.device.uuid in named]
        else:
            is_shared = any(gpu.holder.are_others for gpu in held)
            number = gpus_setting.num_free(gpus) or (1 if is_shared and not gpus else len(free))
            number = min(number, len(free), len(free) if most is None else most)
            # What was offered before stays, so that the choice does not change with a few MiB.
            if len(self._proposed) == number and set(self._proposed) <= {gpu.device.uuid for gpu in free}:
                return self._proposed
            found = [gpu.device.uuid for gpu in self.best(free, number)]
        self._proposed = found if most is None else found[:most]
        return self._proposed

    def choose(
        self,
        gpus: str,
        ranks: int | None,
        clusters: Sequence[ClusterEntry] = (),
        most: int | None = None,
        can_wait: bool = False,
    ) -> tuple[Device, ...]:
        """The device of every rank, in order of rank: free GPUs, or the CPU where there is no GPU.

        Args:
            gpus: 'auto' or 'free:N'.
            ranks: the number of ranks; None for one on each GPU.
            clusters: all clusters of this user on this host.
            most: how many GPUs 'auto' takes at most where `ranks` is left out; None for all free ones.
            can_wait: whether the message offers to wait.

        Raises:
            ConfigError: there are fewer GPUs than are asked for, whoever has them.
            NoFreeGpuError: too few are free; with who has the others.
        """
        held = self.read(clusters)
        asked = gpus_setting.num_free(gpus)
        num_there = sum(not gpu.reading.problem for gpu in held)
        if asked is not None:
            _require_there(gpus, asked, num_there)
        if not held:
            return devices.one_for_each_rank((), ranks)
        free = [gpu for gpu in held if gpu.holder.is_free]
        # Without a number of GPUs or ranks a single free GPU is enough for a start.
        needed = asked or (min(ranks, num_there) if ranks else 1)
        if len(free) < max(1, needed):
            self.refuse(f"gpus = {gpus!r}", needed, held, can_wait)
        wanted = needed if asked or ranks else min(len(free), most or len(free))
        return devices.one_for_each_rank([gpu.device for gpu in self.best(free, wanted)], ranks)

    def refuse(self, asked: str, needed: int, held: Sequence[HeldGpu], can_wait: bool = False) -> NoReturn:
        """Raise the error that too few of these GPUs are free, with who has the others and what can be done.

        Args:
            asked: the setting and its value.
            needed: how many free GPUs it needs.
            held: the GPUs.
            can_wait: whether to offer a wait.
        """
        raise NoFreeGpuError(_too_few(asked, needed, held, can_wait))

    def best(self, gpus: Sequence[HeldGpu], number: int, beside: Sequence[HeldGpu] = ()) -> list[HeldGpu]:
        """Return so many of these GPUs, in the driver's order: those with the best links, and among these
        those with the most free memory.

        Args:
            gpus: the GPUs to choose from.
            number: how many; at most as many as there are.
            beside: GPUs that are chosen already, and to which the others should have good links.
        """
        if number >= len(gpus):
            return list(gpus)
        costs = self._monitor.link_costs([gpu.device for gpu in [*gpus, *beside]])
        # A difference of some MiB must not decide, because it changes from one moment to the next.
        with_memory = sorted(gpus, key=lambda gpu: -(gpu.free_bytes >> 30))
        groups = (
            combinations(gpus, number)
            if math.comb(len(gpus), number) <= _MAX_TRIED
            else iter([tuple(with_memory[:number])])
        )
        best = min(groups, key=lambda group: (_worst_links(group, beside, costs), _least_memory(group)))
        return [gpu for gpu in gpus if gpu in best]


def assumed(gpus: str, ranks: int | None) -> tuple[Device, ...]:
    """Return the device of every rank for a plan that starts nothing. Free GPUs are looked for only if the
    number of ranks depends on them; otherwise the host's GPUs are taken, whoever has them.

    Raises:
        ConfigError: a GPU is named that is not there, or there are fewer than are asked for.
    """
    if not gpus_setting.takes_free(gpus):
        return devices.choose(gpus, ranks)
    asked = gpus_setting.num_free(gpus)
    if ranks is None and asked is None:
        with closing(GpuChooser()) as chooser, suppress(NoFreeGpuError):
            return chooser.choose(gpus, None)
    there = devices.inventory()
    if asked is not None:
        _require_there(gpus, asked, len(there))
    return devices.one_for_each_rank(there[:asked], ranks)


def _require_there(gpus: str, asked: int, num_there: int) -> None:
    if asked > num_there:
        are = "no GPU is" if num_there == 0 else f"{num_there} GPU{' is' if num_there == 1 else 's are'}"
        fewer = "Take CPU ranks with 'none'" if num_there == 0 else f"Take 'free:{num_there}', or fewer"
        raise ConfigError(f"gpus = {gpus!r}: {are} visible here. {fewer}")


def _worst_links(
    group: Sequence[HeldGpu], beside: Sequence[HeldGpu], costs: Mapping[frozenset[str], int]
) -> tuple[int, int]:
    """Return the costs by which groups of GPUs are compared: that of the worst link, and then the sum."""
    pairs = combinations([*group, *beside], 2)
    found = [costs.get(frozenset((one.device.uuid, other.device.uuid)), 0) for one, other in pairs]
    return max(found, default=0), sum(found)


def _least_memory(group: Sequence[HeldGpu]) -> tuple[int, int]:
    """Return the least and the total free memory of a group in whole GiB, negative, so that `min` prefers
    more."""
    free = [gpu.free_bytes >> 30 for gpu in group]
    return -min(free), -sum(free)


def _too_few(asked: str, needed: int, held: Sequence[HeldGpu], can_wait: bool) -> str:
    """Return the message of a NoFreeGpuError: how many GPUs are free, who has the others, and in the last
    line what the person can do."""
    free = [gpu for gpu in held if gpu.holder.is_free]
    taken = [gpu for gpu in held if not gpu.holder.is_free]
    there = f"{len(held)} GPU{'s' if len(held) > 1 else ''}"
    are_free = f"{len(free) or 'none'} of {there} {'are' if len(free) > 1 else 'is'} free"
    wanted = f", and {needed} are needed" if needed > 1 else ""
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
        [f"{asked}: {are_free}{wanted}", *(gpu.describe() for gpu in taken), "You can " + "; ".join(offers)]
    )
