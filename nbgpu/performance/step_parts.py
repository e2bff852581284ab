"""Where the time of training steps went on each rank, and which rank the others waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from nbgpu.performance.clocks import Clocks
from nbgpu.protocol.records import Event, Sample

_RECORDED = ("data_s", "forward_s", "backward_s", "optimizer_s")
_REQUIRED = {"step_s", "begun_at_s", *_RECORDED}
_STATISTICS_OF_PASS = {"forward_s": "forward_statistics_s", "backward_s": "backward_statistics_s"}
"""By the recorded time of a pass, the time within it for which the rank waited for BatchNorm's statistics."""
_EXCHANGE_VALUES = {"ready_at_s", "exposed_s"}
STATISTICS = "statistics_s"
"""The part in which a rank waits for the statistics that BatchNorm computes over all ranks; recorded on CPU
ranks with `sync_batchnorm`."""
PARTS = (*_RECORDED[:3], STATISTICS, "waiting_s", "transfer_s", _RECORDED[3], "other_s")
"""The parts that add up to a step, in their order. `waiting_s` and `transfer_s` are the exchange of gradients
that the backward pass does not hide: until the slowest rank has its gradients, and from then on. They exist
only where DDP sends buckets."""
MOSTLY = 0.7
"""A rank that is last in at least this share of the steps is slower, and not just unlucky."""
HIDDEN = "hidden_s"
"""The part of the exchange that overlaps with the backward pass."""


@dataclass(frozen=True)
class StepParts:
    """One step of one rank, in seconds."""

    step: int
    rank: int
    step_s: float
    begun_at_s: float
    """When the step began, on the host's monotonic clock."""
    parts_s: Mapping[str, float]
    """By part; they add up to `step_s`."""
    hidden_s: float | None
    """None where no buckets were sent."""
    last_rank: int | None
    """The rank whose gradients were ready last, for which the others waited; None where no buckets were
    sent."""


def parts_of(records: Iterable[Sample | Event], num_ranks: int) -> list[StepParts]:
    """Return the parts of each step that all ranks have recorded, in order of steps and ranks.

    Of a step that was repeated, the last repetition counts.

    Args:
        records: the records of a run, those of each rank in order.
        num_ranks: the number of ranks.
    """
    by_step: dict[int, dict[int, Mapping[str, float]]] = {}
    events = []
    for record in records:
        if isinstance(record, Event):
            events.append(record)
        # A run that continues with fewer ranks may repeat steps that more ranks have recorded before.
        elif record.rank < num_ranks and record.values.keys() >= _REQUIRED:
            by_step.setdefault(record.step, {})[record.rank] = record.values
    clocks = Clocks.of(events, num_ranks)
    return [
        parts
        for step, by_rank in sorted(by_step.items())
        if len(by_rank) == num_ranks and _are_together(by_rank, clocks)
        for parts in _step_parts(step, by_rank, clocks)
    ]


def _are_together(by_rank: Mapping[int, Mapping[str, float]], clocks: Clocks) -> bool:
    """Return whether all ranks recorded a step in the same attempt: after a failure some ranks may have
    repeated a step that others have only recorded before it."""
    begins_s = {rank: clocks.of_rank_0(rank, values["begun_at_s"]) for rank, values in by_rank.items()}
    return max(begins_s.values()) <= min(begins_s[rank] + by_rank[rank]["step_s"] for rank in by_rank)


def _step_parts(step: int, by_rank: Mapping[int, Mapping[str, float]], clocks: Clocks) -> list[StepParts]:
    """Split one step of each rank into its parts, in order of rank. A rank waits from the time at which its
    own gradients are ready until those of the last rank are ready, and from then on for the transfer.

    Args:
        step: the number of the step.
        by_rank: the values of the step's record, for every rank.
        clocks: convert the ranks' clocks to that of rank 0.
    """
    ready_at_s = {
        rank: clocks.of_rank_0(rank, values["ready_at_s"])
        for rank, values in by_rank.items()
        if values.keys() >= _EXCHANGE_VALUES
    }
    last_rank = max(ready_at_s, key=ready_at_s.__getitem__) if len(ready_at_s) == len(by_rank) else None
    parts_of_ranks = []
    for rank, values in sorted(by_rank.items()):
        parts_s = {name: values[name] for name in _RECORDED}
        for name, waited in _STATISTICS_OF_PASS.items():
            if waited in values:
                parts_s[name] = max(0.0, parts_s[name] - values[waited])
                parts_s[STATISTICS] = parts_s.get(STATISTICS, 0.0) + values[waited]
        if last_rank is not None:
            waiting_s = min(ready_at_s[last_rank] - ready_at_s[rank], values["exposed_s"])
            parts_s |= {"waiting_s": waiting_s, "transfer_s": values["exposed_s"] - waiting_s}
        elif "exposed_s" in values:
            parts_s["transfer_s"] = values["exposed_s"]
        # On a GPU the host may run ahead of the device, so that the parts of a step may exceed its time.
        parts_s["other_s"] = max(0.0, values["step_s"] - sum(parts_s.values()))
        parts_of_ranks.append(
            StepParts(
                step,
                rank,
                values["step_s"],
                values["begun_at_s"],
                {name: parts_s[name] for name in PARTS if name in parts_s},
                values.get("hidden_s"),
                last_rank,
            )
        )
    return parts_of_ranks


def middle_half(steps: Sequence[StepParts]) -> dict[str, float]:
    """Return the mean parts, in seconds, of the steps between the first and the third quartile of step times;
    with `hidden_s` if it was recorded.

    Unlike medians, means add up to the mean step. The quartiles exclude steps that other work on the machine
    has disturbed.
    """
    slowest_s: dict[int, float] = {}
    for parts in steps:
        slowest_s[parts.step] = max(parts.step_s, slowest_s.get(parts.step, 0.0))
    chosen = set(slowest_s)
    if len(chosen) > 1:
        low, _, high = quantiles(slowest_s.values(), n=4)
        chosen = {step for step, seconds in slowest_s.items() if low <= seconds <= high} or chosen
    counting = [parts for parts in steps if parts.step in chosen]
    if not counting:
        return {}
    names = [name for name in PARTS if all(name in parts.parts_s for parts in counting)]
    means = {name: sum(parts.parts_s[name] for parts in counting) / len(counting) for name in names}
    hidden = [parts.hidden_s for parts in counting if parts.hidden_s is not None]
    return means | ({HIDDEN: sum(hidden) / len(hidden)} if hidden else {})


def slowest_rank(steps: Sequence[StepParts]) -> tuple[int, float] | None:
    """Return the rank that was last in most steps, and the share of these steps; None if no buckets were
    sent, and for a single rank, for which no rank waits."""
    if len({parts.rank for parts in steps}) < 2:
        return None
    by_step = {parts.step: parts.last_rank for parts in steps if parts.last_rank is not None}
    if not by_step:
        return None
    ((rank, count),) = Counter(by_step.values()).most_common(1)
    return rank, count / len(by_step)
