"""Assumptions about the devices of other hosts before these hosts have dialled in."""

from __future__ import annotations

from collections.abc import Sequence

from nbgpu.config import ClusterConfig
from nbgpu.machine import devices
from nbgpu.protocol.records import Device

UNKNOWN = (Device("cuda", "", "GPU-0", 0, 0), Device("cuda", "", "GPU-1", 1, 0))
"""Stands for the devices of hosts that have not dialled in: settings that need GPUs are not refused yet."""


def assumed_devices(cluster: ClusterConfig) -> Sequence[Device]:
    """Return a device for each rank of a cluster on other hosts, by its settings alone; one rank on each host
    where `gpus_per_node` is left out."""
    num_ranks = (cluster.gpus_per_node or 1) * cluster.num_hosts
    if cluster.gpus == "none":
        return devices.choose("none", num_ranks)
    return [UNKNOWN[rank % len(UNKNOWN)] for rank in range(num_ranks)]
