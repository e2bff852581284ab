"""The connection between two GPUs of this host, according to NVML.

The caller has called `nvmlInit`. NVML's documentation: "Device Queries" and "NvLink Methods".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pynvml

P2P_STATUS = {
    pynvml.NVML_P2P_STATUS_OK: "P2P",
    pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORED: "no P2P (chipset)",
    pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "no P2P (GPU)",
    pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "no P2P (topology)",
    pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "no P2P (disabled in the driver)",
}
TOPOLOGY = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "one host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "one NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "across NUMA nodes",
}


@dataclass(frozen=True, slots=True)
class PairOfGpus:
    """The connection between two GPUs."""

    p2p_status: int
    """NVML's status of reads from one GPU's memory by the other."""
    has_nvlink: bool
    topology: int
    """NVML's level of the nearest common ancestor; the smaller, the nearer."""

    @property
    def has_p2p(self) -> bool:
        return bool(self.p2p_status == pynvml.NVML_P2P_STATUS_OK)

    def describe(self) -> str:
        """Return the connection as text: 'P2P over NVLink', 'no P2P (chipset), one PCIe switch'."""
        status = P2P_STATUS.get(self.p2p_status, "no P2P")
        if self.has_nvlink:
            return f"{status} over NVLink"
        return f"{status}, {TOPOLOGY.get(self.topology, 'unknown topology')}"

    @property
    def cost(self) -> int:
        """A rank of connections: the smaller, the faster two GPUs exchange gradients."""
        if self.has_nvlink:
            return 0
        # Any connection with P2P is better than any without, which goes through the host's memory.
        return int(self.topology) + (1 if self.has_p2p else 1 + pynvml.NVML_TOPOLOGY_SYSTEM)


def pair(first: Any, second: Any) -> PairOfGpus:
    """Return the connection between the GPUs of two handles.

    Raises:
        pynvml.NVMLError: the driver does not report the connection.
    """
    nvlink = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return PairOfGpus(
        p2p_status=pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_READ),
        has_nvlink=nvlink == pynvml.NVML_P2P_STATUS_OK,
        topology=pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second),
    )


def costs(gpus: Mapping[str, Any]) -> dict[frozenset[str], int]:
    """Return the cost of the connection between each two GPUs; a pair that the driver does not describe is
    left out.

    Args:
        gpus: the handles of whole GPUs by UUID.
    """
    cost_of = {}
    for (uuid, handle), (other_uuid, other_handle) in combinations(gpus.items(), 2):
        with suppress(pynvml.NVMLError):
            cost_of[frozenset((uuid, other_uuid))] = pair(handle, other_handle).cost
    return cost_of


def neighbours(gpus: Mapping[int, Any]) -> dict[int, str]:
    """Describe the nearest other GPUs of each GPU, such as 'NVLink to GPUs 1, 2 and 3' or 'PCIe switch
    shared with GPU 1'; empty if no other GPU is near or the driver does not report it.

    Args:
        gpus: the handles of whole GPUs by the driver's number.
    """
    by_nvlink: dict[int, list[int]] = {index: [] for index in gpus}
    by_switch: dict[int, list[int]] = {index: [] for index in gpus}
    for (i, first), (j, second) in combinations(gpus.items(), 2):
        # The error of a faulty GPU is reported when its state is read.
        with suppress(pynvml.NVMLError):
            connection = pair(first, second)
            if connection.has_nvlink:
                by_nvlink[i].append(j)
                by_nvlink[j].append(i)
            elif connection.topology <= pynvml.NVML_TOPOLOGY_MULTIPLE:
                by_switch[i].append(j)
                by_switch[j].append(i)
    descriptions = dict.fromkeys(gpus, "")
    for index in gpus:
        if by_nvlink[index]:
            descriptions[index] = f"NVLink to {_listed(by_nvlink[index], len(gpus))}"
        elif by_switch[index]:
            descriptions[index] = f"PCIe switch shared with {_listed(by_switch[index], len(gpus))}"
    return descriptions


def _listed(others: Sequence[int], num_gpus: int) -> str:
    """Return GPUs as text: 'all others', 'GPU 1', 'GPUs 1, 2 and 3'."""
    if len(others) == num_gpus - 1 > 1:
        return "all others"
    *first, last = map(str, others)
    return f"GPUs {', '.join(first)} and {last}" if first else f"GPU {last}"
