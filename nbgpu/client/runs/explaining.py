"""What a run's records say about what bounds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from nbgpu.config import TrainConfig, read_tables
from nbgpu.errors import RunError
from nbgpu.machine.links import parse_link
from nbgpu.performance import advice, rank_steps
from nbgpu.performance.bottlenecks import Explanation, Observed
from nbgpu.performance.costs import Costs, MeasuredCosts, RingCosts
from nbgpu.performance.links import Links
from nbgpu.performance.other_buckets import ExchangeModel
from nbgpu.performance.schedule import Bucket
from nbgpu.performance.step_parts import StepParts, parts_of
from nbgpu.protocol.records import TIMELINE, Event, Sample
from nbgpu.run_folder import names
from nbgpu.run_folder.reader import Reader

_FIRST_STEPS = 5
"""The first steps of a run take longer: memory is taken, and DDP makes its buckets. They do not count if
there are enough others."""
_LEAST_STEPS = 5


_TRAVELLING = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""By `comm_hook`, the share of a gradient's bytes that travels, where it is known."""


def explain(
    folder: Path, reader: Reader, config: TrainConfig, num_ranks: int, links: Links | None = None
) -> Explanation:
    """Say what bounds a run, by what its ranks have recorded so far.

    Args:
        folder: the run's.
        reader: of its records.
        config: its settings.
        num_ranks: its ranks.
        links: of its ranks, as measured; None if they are not known. A simulated link is always known.

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
    costs = MeasuredCosts(links) if links is not None else _simulated(folder)
    in_steps = [record for record in records if isinstance(record, Sample) and record.step >= first]
    return advice.explain(
        Observed(
            steps=counting,
            between_s=_between_s(counting, records, config.checkpoint_every),
            samples_per_step=config.samples_per_step(num_ranks),
            settings=_settings(config),
            exchange=None if costs is None else _exchange(records, config, num_ranks, costs),
            cores_each=_mean_percent(in_steps, "utilization_percent") / 100,
            coreless_share=_mean_percent(in_steps, "utilization_lost_percent") / 100,
        )
    )


def _mean_percent(samples: Iterable[Sample], name: str) -> float:
    """The mean of a series over all ranks; 0 where it was not measured, as in a run of a second."""
    values = [sample.values[name] for sample in samples if name in sample.values]
    return mean(values) if values else 0.0


def _simulated(folder: Path) -> Costs | None:
    """The simulated link of the run's cluster; None if the link is a real one."""
    link = read_tables(folder / names.SETTINGS).get("cluster", {}).get("link", "")
    return RingCosts(parse_link(link)) if link else None


def _exchange(
    records: Iterable[Sample | Event], config: TrainConfig, num_ranks: int, costs: Costs
) -> ExchangeModel | None:
    """Return a model of the gradients' exchange, averaged over the steps that have a timeline; None if no
    buckets of gradients travelled."""
    travelling = _TRAVELLING.get(config.comm_hook)
    if config.strategy != "ddp" or num_ranks < 2 or travelling is None:
        return None
    # The buckets of each backward pass that exchanged gradients, with the time at which each was ready.
    exchanged: list[list[Bucket]] = []
    for event in records:
        if not isinstance(event, Event) or event.kind != TIMELINE:
            continue
        step = rank_steps.from_moments(event.step, event.rank, event.detail)
        passes = [] if step is None else [span for span in step.work if span.kind == "backward"]
        if step is None or not passes:
            continue
        # Micro-batches before the last one exchange nothing.
        for span in passes:
            buckets = [
                Bucket(sent.begin_s - span.begin_s, travelling * sent.num_bytes)
                for sent in step.sent
                if span.begin_s <= sent.begin_s <= span.end_s
            ]
            if buckets:
                exchanged.append(buckets)
    if not exchanged:
        return None
    # Only passes with the usual number count, because DDP makes its buckets anew after the first step.
    ((usual, _),) = Counter(map(len, exchanged)).most_common(1)
    alike = [buckets for buckets in exchanged if len(buckets) == usual]
    average = [
        Bucket(mean(bucket.ready_s for bucket in same_bucket), same_bucket[0].num_bytes)
        for same_bucket in zip(*alike, strict=True)
    ]
    return ExchangeModel(average, average[-1].ready_s, costs, num_ranks)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that mean something in the recipe."""
    return {name: value for name, value in config.model_dump().items() if name not in config.UNUSED}


def _between_s(
    steps: Sequence[StepParts], records: Sequence[Sample | Event], checkpoint_every: int
) -> dict[str, float]:
    """Return what rank 0 spent time on between its steps, in seconds for each step on average: validation,
    checkpoints and other things. Pauses do not count."""
    # By step: the time from its end to the beginning of the next one.
    of_rank = [parts for parts in steps if parts.rank == 0]
    gaps_s = {
        before.step: after.begun_at_s - before.begun_at_s - before.step_s
        for before, after in pairwise(of_rank)
        if after.step == before.step + 1
    }
    # By step: how long the rank was in each of these states after it.
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
    # What is left of a gap counts as a checkpoint's where one was due.
    saved = {record.step for record in records if isinstance(record, Event) and record.kind == "checkpoint"}
    if checkpoint_every:
        # One that is left out, because the last one is still being written, takes time too.
        saved |= {step for step in gaps_s if step % checkpoint_every == 0}
    spent_s = {"validation": 0.0, "checkpoints": 0.0, "other": 0.0}
    for step, gap_s in gaps_s.items():
        validated_s = min(max(0.0, gap_s), in_states["validating"].get(step, 0.0))
        rest_s = max(0.0, gap_s - validated_s - in_states["paused"].get(step, 0.0))
        spent_s["validation"] += validated_s
        spent_s["checkpoints" if step in saved else "other"] += rest_s
    return {name: seconds / max(1, len(gaps_s)) for name, seconds in spent_s.items()}
