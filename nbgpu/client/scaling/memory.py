"""Measure and predict the memory of a training step on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from nbgpu.client.cluster.cluster import Cluster, current
from nbgpu.client.engines.calls import reference
from nbgpu.config import TrainConfig, train_config
from nbgpu.errors import ConfigError
from nbgpu.performance.memory import MeasuredMemory, Memory, PredictedMemory
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.calls import Call
from nbgpu.text.ranks import count_of_ranks

_MAX_RANKS = 1024
_MAX_VARIANTS = 256
"""Each takes about a second."""


def memory(recipe: str, cluster: Cluster | None = None, with_data: bool = False, **settings: Any) -> Memory:
    """Measure what a training step takes on each rank, by category, and compare it with the prediction.

    All ranks take a few steps of a run on generated batches, with the exchange of gradients. Their variables
    stay as they are, and their memory is free afterwards. `cluster.plan` only predicts.

    Args:
        recipe: the recipe's name, such as 'autoencoder', or the path of your own.
        cluster: a cluster that runs; None for the current one.
        with_data: whether to read the recipe's data, too, and measure what `cache_rate` keeps of them in host
            memory. It takes as long as the beginning of a run.
        settings: as for `Cluster.train`.

    Returns:
        The memory of each rank, which prints as a table. Its `predict` says what other settings, or another
        number of ranks, would take.

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
    left_out = config.left_to_data
    config = cluster.parts.runs.settle(config).config
    settings = settings | {name: getattr(config, name) for name in left_out}
    found = cluster.apply(reference(Call.MEASURE_MEMORY), config.model_dump(mode="json"), with_data)
    measured = [
        MeasuredMemory(
            rank,
            of_rank["tensors"],
            of_rank["before_bytes"],
            of_rank["peak_bytes"],
            of_rank["cached_bytes"],
        )
        for rank, of_rank in sorted(found.items())
    ]
    (predicted,) = _predicted(cluster, [({}, config, num_ranks)])

    def predict(changes: Mapping[str, Any], ranks: Any) -> list[PredictedMemory]:
        return _predicted(cluster, list(_variants(cluster, recipe, settings, changes, ranks)))

    return Memory(_title(config, num_ranks), cluster.devices[0].kind, measured, predicted, predict)


def _variants(
    cluster: Cluster, recipe: str, settings: Mapping[str, Any], changes: Mapping[str, Any], ranks: Any
) -> list[tuple[dict[str, Any], TrainConfig, int]]:
    """Return (the changed settings, all settings, the number of ranks) for all combinations.

    Raises:
        ConfigError: some are not valid; the message has all of them.
    """
    of_ranks = _listed(cluster.world_size if ranks is None else ranks)
    choices = [_listed(value) for value in changes.values()]
    found, problems = [], []
    for num_ranks, *values in product(of_ranks, *choices):
        changed = dict(zip(changes, values, strict=True))
        shown = ", ".join(f"{name}={value!r}" for name, value in {"ranks": num_ranks, **changed}.items())
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or not 1 <= num_ranks <= _MAX_RANKS:
            problems.append(f"ranks = {num_ranks!r} is not valid: 1 to {_MAX_RANKS}")
            continue
        try:
            config = adapt_to_devices(
                train_config(recipe, **{**settings, **changed}), [cluster.devices[0]] * num_ranks
            )
        except ConfigError as error:
            problems.append(f"{shown}: {error}")
            continue
        found.append(({"ranks": num_ranks, **changed}, config, num_ranks))
    if len(found) > _MAX_VARIANTS:
        problems.append(f"{len(found)} combinations are more than {_MAX_VARIANTS}. Give fewer values")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return found


def _predicted(
    cluster: Cluster, variants: Sequence[tuple[dict[str, Any], TrainConfig, int]]
) -> list[PredictedMemory]:
    asked = [(config.model_dump(mode="json"), num_ranks) for _, config, num_ranks in variants]
    found = cluster.apply(reference(Call.PREDICT_MEMORY), asked, ranks=[0])[0]
    return [
        PredictedMemory(changed, of_variant.get("tensors"), of_variant.get("unknown", ""))
        for (changed, _, _), of_variant in zip(variants, found, strict=True)
    ]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | range) else [value]


def _title(config: TrainConfig, num_ranks: int) -> str:
    title = f"{config.recipe}, batch_size={config.batch_size}, strategy={config.strategy}"
    if config.accumulate > 1:
        title += f", accumulate={config.accumulate}"
    if config.amp != "off":
        title += f", amp={config.amp}"
    if config.checkpoint_activations:
        title += ", checkpoint_activations"
    return f"{title}; {count_of_ranks(num_ranks)}"
