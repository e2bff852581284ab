"""Asks a cluster's ranks, before a run starts, for a plan of the run or for the largest batch that fits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.runs.batch_sizes import BatchSizes
from nbgpu.client.runs.plan import Plan, data_in_words
from nbgpu.config import ClusterConfig, TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.machine.transports import ChosenTransport
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import Device

_FOUND_BY_SEARCH = ("batch_size", "global_batch_size")


class Planned(Protocol):
    """The cluster, as far as the code that plans runs on it knows it."""

    config: ClusterConfig
    devices: tuple[Device, ...]
    chosen_transport: ChosenTransport
    recovery: Recovery

    @property
    def ranks(self) -> Ranks: ...


def plan(cluster: Planned, config: TrainConfig) -> Plan:
    """Return a plan of a run with these settings on ranks that are ready."""
    (estimate,) = _ask(cluster, Call.ESTIMATE_MEMORY, config, ranks=[0])
    data, steps_per_epoch = data_in_words(config, len(cluster.devices), estimate["data"])
    memory = estimate["memory"]
    return Plan(
        cluster.config, config, cluster.devices, cluster.chosen_transport, memory, data, steps_per_epoch
    )


def find_batch_size(cluster: Planned, config: TrainConfig, stop: threading.Event | None = None) -> BatchSizes:
    """Return the largest batch that fits on ranks that are ready; setting `stop` ends the search."""
    found, *_ = _ask(cluster, Call.FIND_BATCH_SIZE, config, stop=stop)
    return BatchSizes(found)


def _ask(
    cluster: Planned,
    call: Call,
    config: TrainConfig,
    ranks: Sequence[int] | None = None,
    stop: threading.Event | None = None,
) -> list[Any]:
    results = cluster.ranks.call(call, config.model_dump(mode="json"), ranks=ranks)
    cluster.recovery.bring_back(RankWatch(cluster.ranks, results), results, stop)
    return [result.result() for result in results.values()]


def for_search(config: TrainConfig) -> TrainConfig:
    """Return the settings for a search for the largest batch, in which the run's own batch sizes do not
    count.

    Raises:
        ConfigError: there is nothing to search for with these settings.
    """
    if "batch_size" in config.UNUSED:
        raise ConfigError(f"the recipe {config.recipe!r} has no batches, and so no largest one that fits")
    if config.strategy == "fsdp":
        raise ConfigError(
            "find_batch_size does not know strategy='fsdp': each rank has the whole model in its tries, and a part of it "
            "in the run. cluster.plan(..., strategy='fsdp', batch_size=N).fits is an estimate for one size"
        )
    fields = type(config).model_fields
    return config.changed(**{name: fields[name].default for name in _FOUND_BY_SEARCH})


def without_batch_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without those that a search finds, which may have any value."""
    return {name: value for name, value in settings.items() if name not in _FOUND_BY_SEARCH}
