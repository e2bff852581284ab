"""NCCL's times on GPUs that are not here, by torch's model of NCCL."""

from __future__ import annotations

from nbgpu.client.cluster.cluster import Cluster, current
from nbgpu.client.engines.calls import reference
from nbgpu.errors import ConfigError
from nbgpu.performance.nccl import GPUS, MAX_RANKS, NcclTimes
from nbgpu.protocol.calls import Call


def nccl_times(
    gpu: str = "H100", ranks_per_node: int = 8, nvlink: bool = True, cluster: Cluster | None = None
) -> NcclTimes:
    """Return how long NCCL's collectives take on some GPUs, modelled; for `StepTimes.predict(link=...)`.

    A rank computes them with torch's own model of NCCL, which chooses between rings and trees and between
    NCCL's protocols. No GPU is needed. Between nodes it has the InfiniBand of the GPUs' time.

    Args:
        gpu: 'V100', 'A100', 'H100' or 'B200'.
        ranks_per_node: GPUs on each node, 1 to 1024.
        nvlink: whether NVLink joins the GPUs of a node; else PCIe.
        cluster: a cluster that runs; None for the current one.

    Raises:
        ConfigError: an argument is not valid.
        NoClusterError: no cluster runs.
        RankError: the rank's torch has no such model.
        RunError: a training run has the ranks now.
    """
    wrong = []
    if gpu not in GPUS:
        wrong.append(f"gpu={gpu!r} is not known: {', '.join(GPUS)}")
    if not 1 <= ranks_per_node <= MAX_RANKS:
        wrong.append(f"ranks_per_node = {ranks_per_node} is not valid: 1 to {MAX_RANKS}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    cluster = cluster or current()
    tables = cluster.apply(reference(Call.MODEL_NCCL), gpu, ranks_per_node, nvlink, ranks=[0])
    return NcclTimes(gpu, ranks_per_node, nvlink, tables[0])
