"""Measure, predict or model a training step on a cluster: its memory, its time, and the collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from nbgpu.client.cluster.cluster import Cluster, current
from nbgpu.client.engines.calls import reference
from nbgpu.config import TrainConfig, train_config
from nbgpu.errors import ConfigError
from nbgpu.performance.costs import GPUS, MAX_RANKS, NcclTimes
from nbgpu.performance.links import Links
from nbgpu.performance.memory import MeasuredMemory, Memory, PredictedMemory
from nbgpu.performance.steps import StepTimes
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.calls import Call
from nbgpu.text.ranks import count_of_ranks

_MAX_RANKS = 1024
"""The largest number of ranks for which memory is predicted."""
_MAX_VARIANTS = 256
"""The largest number of predictions in one call; each takes about a second."""
_IN_TITLE = ("accumulate", "amp", "dtype", "optimizer", "ema_decay", "cpu_offload", "checkpoint_activations")
"""Settings that change the memory of a step, beside those that are always in the title."""
BUDGET_S = 12.0
"""The time for the measurement of the links. With the trials before it, which determine how often each size
is measured, it takes less than 20 s."""


def memory(recipe: str, cluster: Cluster | None = None, with_data: bool = False, **settings: Any) -> Memory:
    """Measure the memory of a training step on each rank, by category, and compare it with the prediction.

    All ranks take a few steps of a run on generated batches, with the exchange of gradients. Their variables
    stay as they are, and the memory is freed afterwards. `cluster.plan` only predicts.

    Args:
        recipe: the recipe's name, such as 'autoencoder', or the path of your own.
        cluster: a cluster that runs; None for the current one.
        with_data: whether to read the recipe's data, too, and measure the host memory of the decoded data
            that `cache_rate` keeps. It takes as long as the beginning of a run.
        settings: as for `Cluster.train`.

    Returns:
        The memory of each rank in bytes, which prints as a table. Its `predict` predicts the memory for other
        settings or another number of ranks.

    Raises:
        ConfigError: a setting is not valid, or the recipe has no batches.
        NoClusterError: no cluster runs.
        RankError: a step failed on a rank, such as for lack of memory, or a file cannot be used.
        RunError: a training run has the ranks now.
    """
    cluster = cluster or current()
    config = train_config(recipe, **settings)
    if "batch_size" in config.UNUSED:
        raise ConfigError(f"the recipe {config.recipe!r} has no batches; cluster.plan estimates its memory")
    num_ranks = cluster.world_size
    left_to_data = config.left_to_data
    config = cluster.parts.runs.settle(config).config
    # Predictions for other settings start from the values that were chosen from the data.
    settings = settings | {name: getattr(config, name) for name in left_to_data}
    by_rank = cluster.apply(reference(Call.MEASURE_MEMORY), config.model_dump(mode="json"), with_data)
    measured = [MeasuredMemory(rank, **fields) for rank, fields in sorted(by_rank.items())]
    (predicted,) = _predicted(cluster, [({}, config, num_ranks)])

    def predict(changes: Mapping[str, Any], ranks: Any) -> list[PredictedMemory]:
        return _predicted(cluster, list(_variants(cluster, recipe, settings, changes, ranks)))

    return Memory(_title(config, num_ranks), cluster.devices[0].kind, measured, predicted, predict)


def _variants(
    cluster: Cluster, recipe: str, settings: Mapping[str, Any], changes: Mapping[str, Any], ranks: Any
) -> list[tuple[dict[str, Any], TrainConfig, int]]:
    """Return (the changed settings with the number of ranks, all settings, the number of ranks) for all
    combinations of the changes.

    Args:
        cluster: the cluster, whose devices the ranks are assumed to have.
        recipe: the recipe.
        settings: the settings that were measured.
        changes: for each changed setting its value, or a list of values.
        ranks: a number of ranks, or a list of them; None for that of the cluster.

    Raises:
        ConfigError: some combinations are not valid; the message has all of them.
    """
    rank_choices = _listed(cluster.world_size if ranks is None else ranks)
    choices = [_listed(value) for value in changes.values()]
    variants, problems = [], []
    for num_ranks, *values in product(rank_choices, *choices):
        other_settings = dict(zip(changes, values, strict=True))
        changed = {"ranks": num_ranks, **other_settings}
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or not 1 <= num_ranks <= _MAX_RANKS:
            problems.append(f"ranks = {num_ranks!r} is not valid: 1 to {_MAX_RANKS}")
            continue
        try:
            config = adapt_to_devices(
                train_config(recipe, **{**settings, **other_settings}), [cluster.devices[0]] * num_ranks
            )
        except ConfigError as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            problems.append(f"{shown}: {error}")
            continue
        variants.append((changed, config, num_ranks))
    if len(variants) > _MAX_VARIANTS:
        problems.append(f"{len(variants)} combinations are more than {_MAX_VARIANTS}. Give fewer values")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return variants


def _predicted(
    cluster: Cluster, variants: Sequence[tuple[dict[str, Any], TrainConfig, int]]
) -> list[PredictedMemory]:
    """Have rank 0 predict the memory of each variant, as `_variants` returns them."""
    requests = [(config.model_dump(mode="json"), num_ranks) for _, config, num_ranks in variants]
    predictions = cluster.apply(reference(Call.PREDICT_MEMORY), requests, ranks=[0])[0]
    return [
        PredictedMemory(changed, fields.get("tensors"), fields.get("unknown", ""))
        for (changed, _, _), fields in zip(variants, predictions, strict=True)
    ]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | range) else [value]


def _title(config: TrainConfig, num_ranks: int) -> str:
    """Return the heading of a table of memory: the recipe, its batch and strategy, and the settings of
    `_IN_TITLE` that differ from their defaults."""
    title = [config.recipe, f"batch_size={config.batch_size}", f"strategy={config.strategy}"]
    for name in _IN_TITLE:
        value = getattr(config, name)
        if value != type(config).model_fields[name].default:
            title.append(name if value is True else f"{name}={value}")
    return f"{', '.join(title)}; {count_of_ranks(num_ranks)}"


def measure_links(cluster: Cluster | None = None) -> Links:
    """Measure the time of collectives, and of messages between two ranks, for tensors of 1 KiB to 64 MiB.

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
    """Model how long NCCL's collectives take on some GPUs, for `StepTimes.predict(link=...)`.

    A rank computes the times with torch's own model of NCCL, which chooses between rings and trees and
    between NCCL's protocols. No GPU is needed. Between nodes the model assumes the InfiniBand that was usual
    with these GPUs.

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
    problems = []
    if gpu not in GPUS:
        problems.append(f"gpu={gpu!r} is not known: {', '.join(GPUS)}")
    if not 1 <= ranks_per_node <= MAX_RANKS:
        problems.append(f"ranks_per_node = {ranks_per_node} is not valid: 1 to {MAX_RANKS}")
    if problems:
        raise ConfigError("\n".join(problems))
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
        The times of a step's parts in seconds, which print as a table. Their `predict` models the step for
        other numbers of ranks.

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
