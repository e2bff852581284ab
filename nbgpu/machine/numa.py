"""Bind a rank to the cores of its GPU's NUMA node.

On a host with several nodes, copies between a GPU and the memory of another node cross the link between the
processors. Linux takes new memory from the node of the core that first writes it, so a rank that runs on its
GPU's node has its memory there too. Linux's documentation: "NUMA Memory Policy".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from nbgpu.protocol.records import Device
from nbgpu.text.ranks import parse_ranges

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_OPENMP_AFFINITY = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Environment variables with which a person binds OpenMP's threads to cores."""


class Binding(NamedTuple):
    """The cores of a rank."""

    cores: str
    """The cores as Linux lists them, '0-7,16-23'; empty for a rank that is not bound."""
    num_ranks: int
    """The number of the host's ranks that are bound to these cores."""

    @property
    def share(self) -> int | None:
        """The number of cores for each of these ranks; None for a rank that is not bound."""
        return len(parse(self.cores)) // self.num_ranks if self.cores else None


NOT_BOUND = Binding("", 0)
_bound = NOT_BOUND
"""The binding of this process."""


def node_of_gpu(handle: Any) -> int | None:
    """Return the NUMA node of a GPU; None if the host does not report it, as in most virtual machines.

    Args:
        handle: NVML's handle of the whole GPU.
    """
    try:
        bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
    except pynvml.NVMLError:
        return None
    # NVML has '00000000:1A:00.0', in some bindings as bytes, and Linux '0000:1a:00.0'.
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    file = _PCI_DEVICES / f"{int(domain, 16):04x}:{rest}" / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None


def cores_by_node() -> dict[str, str]:
    """Return the cores of each NUMA node that has some, as Linux lists them, by the node's number."""
    folders = sorted(_NODES.glob("node[0-9]*"))
    cores = {folder.name.removeprefix("node"): (folder / "cpulist").read_text().strip() for folder in folders}
    return {node: cores_of_node for node, cores_of_node in cores.items() if cores_of_node}


def reason_against() -> str:
    """Return why ranks must not be bound to cores; empty if they may be.

    A person or a scheduler may already have bound this process to some of the host's cores, or OpenMP's
    threads to cores. That choice is kept.
    """
    nodes = cores_by_node()
    if len(nodes) < 2:
        return "the host has one NUMA node"
    if variables := [name for name in _OPENMP_AFFINITY if name in os.environ]:
        return f"{' and '.join(variables)} {'is' if len(variables) == 1 else 'are'} set"
    usable, all_cores = os.sched_getaffinity(0), set[int]().union(*map(parse, nodes.values()))
    if usable != all_cores:
        return f"this process was given {len(usable)} of the host's {len(all_cores)} cores"
    return ""


def bindable() -> dict[str, str]:
    """Return `cores_by_node`; empty if ranks must not be bound (`reason_against`)."""
    return {} if reason_against() else cores_by_node()


def binding(nodes: Mapping[str, str], device: Device, devices_here: Sequence[Device]) -> Binding:
    """Return the cores for the rank on `device`.

    Args:
        nodes: the result of `bindable` on the rank's host.
        device: the rank's device.
        devices_here: the device of each rank on that host.
    """
    cores = nodes.get(str(device.numa_node), "")
    if not cores:
        return NOT_BOUND
    return Binding(cores, sum(other.numa_node == device.numa_node for other in devices_here))


def bind(to: Binding) -> None:
    """Restrict the calling thread, and the threads and processes that it starts later, to these cores, if the
    thread may use all of them."""
    global _bound
    cores = parse(to.cores)
    if cores and cores <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
        _bound = to


def follow(to: Binding) -> None:
    """Update the number of ranks that share this process's cores, after the number of ranks has changed. The
    cores stay: they are those of the rank's GPU, or the user's code has changed them."""
    global _bound
    if _bound.cores == to.cores:
        _bound = to


def num_ranks_on_cores() -> int | None:
    """Return the number of ranks that are bound to this process's cores; None if it is not bound."""
    return _bound.num_ranks or None


def parse(cores: str) -> set[int]:
    """Return the numbers of a list of cores such as '0-7,16-23', which may be empty."""
    return set(parse_ranges(cores)) if cores else set()
