"""What a run's records say about what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.errors import RunError
from nbgpu.performance import bottlenecks
from nbgpu.performance.bottlenecks import Explanation, Observed
from nbgpu.performance.step_parts import StepParts, parts_of
from nbgpu.protocol.records import Event, Sample
from nbgpu.run_folder.reader import Reader

_FIRST_STEPS = 5
"""The first steps of a run take longer: memory is taken, and DDP makes its buckets. They do not count if
there are enough others."""
_LEAST_STEPS = 5


def explain(reader: Reader, config: TrainConfig, num_ranks: int) -> Explanation:
    """Say what bounds a run, by what its ranks have recorded so far.

    Raises:
        RunError: fewer than five steps were recorded, or the recipe's steps have no parts.
    """
    records = list(reader.records())
    steps = parts_of(records, num_ranks)
    numbers = sorted({parts.step for parts in steps})
    if len(numbers) < _LEAST_STEPS:
        raise RunError(
            f"{len(numbers)} steps with their parts were recorded, and at least {_LEAST_STEPS} are needed. Recipes that "
            "train no model record none"
        )
    first = numbers[_FIRST_STEPS] if len(numbers) >= 2 * _FIRST_STEPS else numbers[0]
    counting = [parts for parts in steps if parts.step >= first]
    return bottlenecks.explain(
        Observed(
            steps=counting,
            between_s=_between_s(counting, records),
            samples_per_step=config.samples_per_step(num_ranks),
            settings=_settings(config),
        )
    )


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that mean something in the recipe."""
    return {name: value for name, value in config.model_dump().items() if name not in config.UNUSED}


def _between_s(steps: Sequence[StepParts], records: Sequence[Sample | Event]) -> dict[str, float]:
    """The time between the steps of rank 0, on average for each step, by what it was spent on. Pauses do not
    count."""
    of_rank = [parts for parts in steps if parts.rank == 0]
    gaps_s = {
        before.step: after.begun_at_s - before.begun_at_s - before.step_s
        for before, after in pairwise(of_rank)
        if after.step == before.step + 1
    }
    states = [
        record
        for record in records
        if isinstance(record, Event) and record.rank == 0 and record.kind == "state"
    ]
    in_states: dict[str, dict[int, float]] = {"validating": {}, "paused": {}}
    for state, after in pairwise(states):
        if state.text in in_states and state.step in gaps_s:
            of_step = in_states[state.text]
            of_step[state.step] = of_step.get(state.step, 0.0) + after.time_s - state.time_s
    saved = {record.step for record in records if isinstance(record, Event) and record.kind == "checkpoint"}
    spent_s = {"validation": 0.0, "checkpoints": 0.0, "other": 0.0}
    for step, gap_s in gaps_s.items():
        validated_s = min(max(0.0, gap_s), in_states["validating"].get(step, 0.0))
        rest_s = max(0.0, gap_s - validated_s - in_states["paused"].get(step, 0.0))
        spent_s["validation"] += validated_s
        spent_s["checkpoints" if step in saved else "other"] += rest_s
    return {name: seconds / max(1, len(gaps_s)) for name, seconds in spent_s.items()}
