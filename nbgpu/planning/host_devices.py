"""Assumptions about the devices of other hosts, for checks before these hosts have dialled in."""

from __future__ import annotations

from collections.abc import Sequence

from nbgpu.config import ClusterConfig
from nbgpu.machine import devices
from nbgpu.protocol.records import Device

UNKNOWN = (Device("cuda", "", "GPU-0", 0, 0), Device("cuda", "", "GPU-1", 1, 0))
"""Placeholders for the devices of hosts that have not dialled in, so that settings that need GPUs are not
refused yet."""


def assumed_devices(cluster: ClusterConfig) -> Sequence[Device]:
    """Return a device for each rank of a cluster on other hosts, according to its settings: `gpus_per_node`
    ranks on each host, or one if that is left out."""
    num_ranks = (cluster.gpus_per_node or 1) * cluster.num_hosts
    if cluster.gpus == "none":
        return devices.choose("none", num_ranks)
    return [UNKNOWN[rank % len(UNKNOWN)] for rank in range(num_ranks)]
