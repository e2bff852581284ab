"""Measure how fast a cluster's ranks exchange tensors."""

from __future__ import annotations

from nbgpu.client.cluster.cluster import Cluster, current
from nbgpu.client.engines.calls import reference
from nbgpu.errors import ConfigError
from nbgpu.performance.links import Links
from nbgpu.protocol.calls import Call

BUDGET_S = 12.0
"""With its first tries, which show how often each size fits in, a measurement takes less than 20 s."""


def measure_links(cluster: Cluster | None = None) -> Links:
    """Measure the ranks' collectives, and messages between two ranks, for tensors of 1 KiB to 64 MiB.

    It takes less than 20 seconds. Over a slow link the largest sizes are left out.

    Args:
        cluster: a cluster that runs; None for the current one.

    Returns:
        The times, which print as the table of nccl-tests, and latency and bandwidth with their intervals.

    Raises:
        NoClusterError: no cluster runs.
        ConfigError: the cluster has one rank.
        RankError: a rank failed, or could not get the memory, 128 MiB.
        RunError: a training run has the ranks now.
    """
    cluster = cluster or current()
    if cluster.world_size == 1:
        raise ConfigError("one rank has no links to measure. Start a cluster with two ranks at least")
    measured = cluster.apply(reference(Call.MEASURE_LINKS), BUDGET_S)
    backend = cluster.chosen_transport.name
    return Links(backend, [device.name for device in cluster.devices], list(measured.values()))
