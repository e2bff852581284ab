"""Measure, or model, the exchange between a cluster's ranks and the parts of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbgpu.client.cluster.cluster import Cluster, current
from nbgpu.client.engines.calls import reference
from nbgpu.config import train_config
from nbgpu.errors import ConfigError
from nbgpu.performance.links import Links
from nbgpu.performance.nccl import GPUS, MAX_RANKS, NcclTimes
from nbgpu.performance.steps import StepTimes
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
    backend = cluster.parts.state.chosen_transport.name
    return Links(backend, [device.name for device in cluster.devices], list(measured.values()))


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


def time_step(recipe: str, num_steps: int = 10, cluster: Cluster | None = None, **settings: Any) -> StepTimes:
    """Time a step of DDP or FSDP with and without the exchange between the ranks, on generated batches.

    Args:
        recipe: the recipe's name, such as 'autoencoder', or the path of your own.
        num_steps: the number of timed steps of each kind.
        cluster: a cluster that runs; None for the current one.
        settings: as for `Cluster.train`.

    Returns:
        The parts of a step, which print as a table. Their `predict` models the step for other numbers of
        ranks.

    Raises:
        ConfigError: a setting is not valid, there is one rank, or the recipe's steps have no exchange.
        NoClusterError: no cluster runs.
        RankError: a step failed on a rank, or the recipe trains a discriminator.
        RunError: a training run has the ranks now.
    """
    cluster = cluster or current()
    config = train_config(recipe, **settings)
    if "batch_size" in config.UNUSED:
        raise ConfigError(f"the recipe {config.recipe!r} has no batches, and its steps are not those of DDP")
    if num_steps < 1:
        raise ConfigError(f"num_steps = {num_steps} is not valid: at least 1")
    if cluster.world_size == 1:
        raise ConfigError("one rank exchanges nothing. Start a cluster with two ranks at least")
    config = cluster.parts.runs.settle(config).config
    if config.strategy not in ("ddp", "fsdp"):
        raise ConfigError(f"strategy={config.strategy!r} is not timed, only 'ddp' and 'fsdp'")
    measured = cluster.apply(reference(Call.TIME_STEP), config.model_dump(mode="json"), num_steps)
    title = f"{Path(config.recipe).name}, batch_size={config.batch_size}"
    if config.accumulate > 1:
        title += f", accumulate={config.accumulate}"
    exchange = f"bucket_mb={config.bucket_mb:g}" if config.strategy == "ddp" else "strategy=fsdp"
    return StepTimes(
        f"{title}, {exchange}",
        cluster.parts.state.chosen_transport.name,
        config.batch_size * config.accumulate,
        list(measured.values()),
        config.strategy,
    )
