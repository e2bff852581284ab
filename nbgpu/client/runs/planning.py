"""Asks a cluster's ranks, before a run starts, for a plan of the run or for the largest batch that fits."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.runs.plan import Plan, data_in_words
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.machine import devices
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import Chosen
from nbgpu.run_folder import settling
from nbgpu.run_folder.settling import SettledConfig
from nbgpu.text.html import shown_as_html
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

_BATCH_SETTINGS = ("batch_size", "global_batch_size")
_MARGIN = 1 / 10
"""The share of the largest batch that is left for the memory of a run's loggers and checkpoints."""


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes that were tried, in order. It prints as a table."""

    tried: Sequence[Mapping[str, Any]]
    """For each try `batch_size`, `fits`, `peak_bytes` by rank, and `why` it does not fit."""

    @property
    def largest(self) -> int:
        """The largest batch size that fitted on all ranks."""
        return max(int(t["batch_size"]) for t in self.tried if t["fits"])

    @property
    def batch_size(self) -> int:
        """The recommended batch size: the largest that fitted, less a tenth."""
        return max(1, int(self.largest * (1 - _MARGIN)))

    def __str__(self) -> str:
        rows = [("batch_size", "fits", "peak of each rank", "")]
        rows += [
            (
                str(t["batch_size"]),
                "yes" if t["fits"] else "no",
                ", ".join(in_words(num_bytes) for num_bytes in t["peak_bytes"]),
                t["why"],
            )
            for t in self.tried
        ]
        margin = f", which is {self.largest} less a margin" if self.batch_size < self.largest else ""
        return "\n".join([*aligned(rows), f"take batch_size={self.batch_size}{margin}"])

    __repr__ = __str__
    _repr_html_ = shown_as_html


class Planner:
    """Asks a cluster's ranks what a run with some settings would do, and how much memory it would take."""

    def __init__(self, state: ClusterState, recovery: Recovery) -> None:
        self._state = state
        self._recovery = recovery
        self._choices: dict[tuple[Any, ...], Chosen] = {}
        """The values that were chosen from the data, by `_key`. A plan and the run after it need the same
        choice, and so does a run with the batch size that was found."""

    def settle(self, config: TrainConfig, check_sha256: bool = False) -> SettledConfig:
        """Return the settings for ranks that are ready, with values for those that are left to the data; see
        `settling.settle`.

        Raises:
            RankError: settings are left to the data, and no file can be used.
        """

        def choose(whole: TrainConfig) -> Chosen:
            if (key := self._key(config)) not in self._choices:
                state = self._state
                memory_bytes = devices.least_rank_memory_bytes(state.config, state.devices)
                on_gpu = all(device.kind == "cuda" for device in state.devices)
                (self._choices[key],) = self._ask(
                    Call.CHOOSE_FROM_DATA, whole, on_gpu, memory_bytes, ranks=[0]
                )
            return self._choices[key]

        return settling.settle(config, self._state.devices, choose, check_sha256)

    def _key(self, config: TrainConfig) -> tuple[Any, ...]:
        """Return what the choices depend on: the settings, the devices, and the data's time of change."""
        data = Path(config.data).expanduser()
        changed_ns = data.stat().st_mtime_ns if data.exists() else 0
        return config.model_dump_json(), self._state.devices, changed_ns

    def plan(self, settled: SettledConfig) -> Plan:
        """Return a plan of a run with these settings, with rank 0's estimate for the rank that holds the most
        memory already. The ranks must be ready.

        Raises:
            ConfigError: the warm-up would be longer than the run.
        """
        state, config = self._state, settled.config
        (estimate,) = self._ask(Call.ESTIMATE_MEMORY, config, ranks=[0])
        sentences, steps_per_epoch = data_in_words(config, state.world_size, estimate["data"])
        if steps_per_epoch:  # 0 if it is not known
            total_steps = config.total_steps(steps_per_epoch)
            if problem := config.warm_up_problem(total_steps, steps_per_epoch):
                raise ConfigError(problem)
        return Plan(
            cluster=state.config,
            config=config,
            devices=state.devices,
            chosen_transport=state.chosen_transport,
            memory=self._for_fullest_rank(estimate["memory"]),
            data=(*settled.chosen.words, *sentences),
            steps_per_epoch=steps_per_epoch,
            beginning=settled.beginning.notes,
        )

    def _for_fullest_rank(self, memory: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return rank 0's estimate of the memory, with what the fullest rank holds in place of its own."""
        if "peak" not in memory or self._state.world_size == 1:
            return memory
        ranks = self._state.ranks
        held = ranks.wait_for(ranks.call(Call.HELD_MEMORY, ranks=range(1, self._state.world_size)))
        more_bytes = max(0, *(held_bytes - memory["before"] for held_bytes in held.values()))
        return {**memory, "before": memory["before"] + more_bytes, "peak": memory["peak"] + more_bytes}

    def find_batch_size(self, config: TrainConfig, stop: threading.Event | None = None) -> BatchSizes:
        """Return the largest batch that fits on ranks that are ready; setting `stop` ends the search."""
        config = for_search(config)
        tried, *_ = self._ask(Call.FIND_BATCH_SIZE, self.settle(config).config, stop=stop)
        sizes = BatchSizes(tried)
        # A run with this batch must have the same model, for which the batch is the largest: keep the choice.
        if chosen := self._choices.get(self._key(config)):
            self._choices[self._key(config.changed(batch_size=sizes.batch_size))] = chosen
        return sizes

    def _ask(
        self,
        call: Call,
        config: TrainConfig,
        *more: Any,
        ranks: Sequence[int] | None = None,
        stop: threading.Event | None = None,
    ) -> list[Any]:
        """Make a call with a run's settings on ranks, and return their answers in order of rank; setting
        `stop` ends it."""
        results = self._state.ranks.call(call, config.model_dump(mode="json"), *more, ranks=ranks)
        self._recovery.bring_back(RankWatch(self._state.ranks, results), results, stop)
        return [result.result() for result in results.values()]


def for_search(config: TrainConfig) -> TrainConfig:
    """Return the settings for a search for the largest batch: those of the run, with default batch sizes.

    Raises:
        ConfigError: there is nothing to search for with these settings.
    """
    if "batch_size" in config.UNUSED:
        raise ConfigError(f"the recipe {config.recipe!r} has no batches, and so no largest one that fits")
    fields = type(config).model_fields
    return config.changed(**{name: fields[name].default for name in _BATCH_SETTINGS})


def without_batch_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without the batch sizes, which a search ignores even if they are not valid."""
    return {name: value for name, value in settings.items() if name not in _BATCH_SETTINGS}
