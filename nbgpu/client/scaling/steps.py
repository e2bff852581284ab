"""Time the parts of a training step on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbgpu.client.cluster.cluster import Cluster, current
from nbgpu.client.engines.calls import reference
from nbgpu.config import train_config
from nbgpu.errors import ConfigError
from nbgpu.performance.steps import StepTimes
from nbgpu.protocol.calls import Call


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
    config = cluster.with_choices(config)
    if config.strategy not in ("ddp", "fsdp"):
        raise ConfigError(f"strategy={config.strategy!r} is not timed, only 'ddp' and 'fsdp'")
    measured = cluster.apply(reference(Call.TIME_STEP), config.model_dump(mode="json"), num_steps)
    title = f"{Path(config.recipe).name}, batch_size={config.batch_size}"
    if config.accumulate > 1:
        title += f", accumulate={config.accumulate}"
    exchange = f"bucket_mb={config.bucket_mb:g}" if config.strategy == "ddp" else "strategy=fsdp"
    return StepTimes(
        f"{title}, {exchange}",
        cluster.chosen_transport.name,
        config.batch_size * config.accumulate,
        list(measured.values()),
        config.strategy,
    )
