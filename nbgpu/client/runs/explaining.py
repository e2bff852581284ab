"""Explains from a run's records what bounds its speed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from nbgpu.config import OwnConfig, TrainConfig, read_tables
from nbgpu.errors import RunError
from nbgpu.machine.links import parse_link
from nbgpu.performance import advice, rank_steps
from nbgpu.performance.bottlenecks import Explanation, Observed
from nbgpu.performance.costs import Costs, MeasuredCosts, RingCosts
from nbgpu.performance.links import Links
from nbgpu.performance.other_buckets import ExchangeModel
from nbgpu.performance.schedule import Bucket
from nbgpu.performance.step_parts import StepParts, parts_of
from nbgpu.planning import workers
from nbgpu.protocol.records import TIMELINE, Event, Sample
from nbgpu.run_folder import names
from nbgpu.run_folder.reader import Reader

_FIRST_STEPS = 5
"""The first steps of a run take longer, because memory is allocated and DDP builds its buckets. They are left
out if there are enough others."""
_LEAST_STEPS = 5
"""The fewest recorded steps that can be explained."""
_SENT_SHARE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""The share of a gradient's bytes that is sent, by `comm_hook`. PowerSGD's share is not fixed."""


def explain(
    folder: Path, reader: Reader, config: TrainConfig, num_ranks: int, links: Links | None = None
) -> Explanation:
    """Say what bounds a run, from the records of its ranks so far.

    Args:
        folder: the run's folder.
        reader: the reader of the run's records.
        config: the run's settings.
        num_ranks: the run's number of ranks.
        links: the measured links between the ranks; None if they were not measured. The speed of a simulated
            link is known without.

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
    steps = [parts for parts in steps if parts.step >= first]
    costs = MeasuredCosts(links) if links is not None else _simulated(folder)
    samples = [record for record in records if isinstance(record, Sample) and record.step >= first]
    return advice.explain(
        Observed(
            steps=steps,
            between_s=_between_s(steps, records, config.checkpoint_every),
            samples_per_step=config.samples_per_step(num_ranks),
            settings=_settings(config, num_ranks),
            exchange=None if costs is None else _exchange(records, config, num_ranks, costs),
            cores_each=_mean_percent(samples, "utilization_percent") / 100,
            coreless_share=_mean_percent(samples, "utilization_lost_percent") / 100,
        )
    )


def _settings(config: TrainConfig, num_ranks: int) -> dict[str, Any]:
    """Return the settings that the run uses. A number of workers that they leave out is the chosen one."""
    settings = {name: value for name, value in config.model_dump().items() if name not in config.UNUSED}
    if settings.get("num_workers", 0) is None:
        host = workers.this_host(num_ranks)
        is_own = isinstance(config, OwnConfig)
        chosen = workers.workers_for_own(config) if is_own else workers.workers_for(config, host)
        settings["num_workers"] = chosen.count
    return settings


def _mean_percent(samples: Iterable[Sample], name: str) -> float:
    """Return the mean of a series over all ranks; 0 if the run was too short to measure it."""
    values = [sample.values[name] for sample in samples if name in sample.values]
    return mean(values) if values else 0.0


def _simulated(folder: Path) -> Costs | None:
    """Return the costs of collectives over the simulated link of the run's cluster; None if the link is a
    real one."""
    link = read_tables(folder / names.SETTINGS).get("cluster", {}).get("link", "")
    return RingCosts(parse_link(link)) if link else None


def _exchange(
    records: Iterable[Sample | Event], config: TrainConfig, num_ranks: int, costs: Costs
) -> ExchangeModel | None:
    """Return a model of DDP's gradient exchange, averaged over the steps that have a timeline; None if no
    buckets were sent, or their size on the link is not known."""
    sent_share = _SENT_SHARE.get(config.comm_hook)
    if config.strategy != "ddp" or num_ranks < 2 or sent_share is None:
        return None
    # Collect the buckets of each backward pass, with the time from its beginning until each was ready.
    passes: list[list[Bucket]] = []
    for event in records:
        if not isinstance(event, Event) or event.kind != TIMELINE:
            continue
        step = rank_steps.from_moments(event.step, event.rank, event.detail)
        if step is None:
            continue
        for span in step.work:
            if span.kind == "backward":
                buckets = [
                    Bucket(sent.begin_s - span.begin_s, sent_share * sent.num_bytes)
                    for sent in step.sent
                    if span.begin_s <= sent.begin_s <= span.end_s
                ]
                # With gradient accumulation only the last micro-batch exchanges gradients.
                if buckets:
                    passes.append(buckets)
    if not passes:
        return None
    # Average over the passes with the usual number of buckets: DDP rebuilds its buckets after the first step.
    ((usual, _),) = Counter(map(len, passes)).most_common(1)
    alike = [buckets for buckets in passes if len(buckets) == usual]
    average = [
        Bucket(mean(bucket.ready_s for bucket in same_bucket), same_bucket[0].num_bytes)
        for same_bucket in zip(*alike, strict=True)
    ]
    return ExchangeModel(average, average[-1].ready_s, costs, num_ranks)


def _between_s(
    steps: Sequence[StepParts], records: Sequence[Sample | Event], checkpoint_every: int
) -> dict[str, float]:
    """Return the mean time that rank 0 spent between two steps, in seconds, by activity: validation,
    checkpoints and other things. Pauses do not count."""
    events = [record for record in records if isinstance(record, Event)]
    # The time from the end of each step to the beginning of the next one.
    steps_of_rank_0 = [parts for parts in steps if parts.rank == 0]
    gaps_s = {
        before.step: after.begun_at_s - before.begun_at_s - before.step_s
        for before, after in pairwise(steps_of_rank_0)
        if after.step == before.step + 1
    }
    # How long rank 0 was in each state after each step.
    in_state_s: defaultdict[tuple[str, int], float] = defaultdict(float)
    states = [event for event in events if event.rank == 0 and event.kind == "state"]
    for state, after in pairwise(states):
        in_state_s[state.text, state.step] += after.time_s - state.time_s
    # The rest of a gap is taken for a checkpoint if one was due. One that is skipped, because the last one is
    # still being written, takes time too.
    saved = {event.step for event in events if event.kind == "checkpoint"}
    if checkpoint_every:
        saved |= {step for step in gaps_s if step % checkpoint_every == 0}
    spent_s = {"validation": 0.0, "checkpoints": 0.0, "other": 0.0}
    for step, gap_s in gaps_s.items():
        validation_s = min(max(0.0, gap_s), in_state_s["validating", step])
        rest_s = max(0.0, gap_s - validation_s - in_state_s["paused", step])
        spent_s["validation"] += validation_s
        spent_s["checkpoints" if step in saved else "other"] += rest_s
    return {name: seconds / max(1, len(gaps_s)) for name, seconds in spent_s.items()}
