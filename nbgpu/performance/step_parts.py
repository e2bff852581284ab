"""Where the time of training steps went on each rank, and which rank the others waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from nbgpu.performance.clocks import Clocks
from nbgpu.protocol.records import Event, Sample

_OWN = ("data_s", "forward_s", "backward_s", "optimizer_s")
_NEEDED = {"step_s", "begun_at_s", *_OWN}
_WITH_STATISTICS = {"forward_s": "forward_statistics_s", "backward_s": "backward_statistics_s"}
"""What is recorded of a pass, and the part of it in which the rank waited for statistics."""
_OF_AN_EXCHANGE = {"ready_at_s", "exposed_s"}
STATISTICS = "statistics_s"
"""The part in which a rank waits for the statistics that BatchNorm takes over all ranks; known on CPU ranks
with `sync_batchnorm`."""
PARTS = (*_OWN[:3], STATISTICS, "waiting_s", "transfer_s", _OWN[3], "other_s")
"""The parts that add up to a step, in their order. `waiting_s` and `transfer_s` are the exchange of gradients
that the backward pass does not hide: until the slowest rank has its gradients, and from then on. They are
known only where DDP sends buckets."""
MOSTLY = 0.7
"""The share of the steps from which on a rank that is last is slower, and not just unlucky."""
HIDDEN = "hidden_s"
"""The part of the exchange that happens during the backward pass."""


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

    A step that was repeated counts as it was done last.

    Args:
        records: those of a run, of each rank in order.
        num_ranks: the number of ranks.
    """
    by_step: dict[int, dict[int, Mapping[str, float]]] = {}
    events = []
    for record in records:
        if isinstance(record, Event):
            events.append(record)
        # A run that goes on with fewer ranks repeats steps of more.
        elif record.rank < num_ranks and record.values.keys() >= _NEEDED:
            by_step.setdefault(record.step, {})[record.rank] = record.values
    clocks = Clocks.of(events, num_ranks)
    return [
        parts
        for step, of_ranks in sorted(by_step.items())
        if len(of_ranks) == num_ranks and _are_together(of_ranks, clocks)
        for parts in _step_parts(step, of_ranks, clocks)
    ]


def _are_together(of_ranks: Mapping[int, Mapping[str, float]], clocks: Clocks) -> bool:
    """Return whether all ranks recorded a step in the same attempt: some may have done it before a failure,
    and others have repeated it."""
    begins_s = {rank: clocks.of_rank_0(rank, values["begun_at_s"]) for rank, values in of_ranks.items()}
    return max(begins_s.values()) <= min(begins_s[rank] + of_ranks[rank]["step_s"] for rank in of_ranks)


def _step_parts(step: int, of_ranks: Mapping[int, Mapping[str, float]], clocks: Clocks) -> list[StepParts]:
    """Split one step of each rank into its parts, in order of rank. Ranks wait from the moment at which their
    own gradients are ready until the last rank's are, and from then on for the transfer.

    Args:
        step: the number of the step.
        of_ranks: the values of the step's record, for every rank.
        clocks: bring the ranks' clocks together.
    """
    ready_at_s = {
        rank: clocks.of_rank_0(rank, values["ready_at_s"])
        for rank, values in of_ranks.items()
        if values.keys() >= _OF_AN_EXCHANGE
    }
    last_rank = (
        max(ready_at_s, key=lambda rank: ready_at_s[rank]) if len(ready_at_s) == len(of_ranks) else None
    )
    parts_of_ranks = []
    for rank, values in sorted(of_ranks.items()):
        parts_s = {name: values[name] for name in _OWN}
        for whole, waited in _WITH_STATISTICS.items():
            if waited in values:
                parts_s[whole] = max(0.0, parts_s[whole] - values[waited])
                parts_s[STATISTICS] = parts_s.get(STATISTICS, 0.0) + values[waited]
        if last_rank is not None:
            waiting_s = min(ready_at_s[last_rank] - ready_at_s[rank], values["exposed_s"])
            parts_s |= {"waiting_s": waiting_s, "transfer_s": values["exposed_s"] - waiting_s}
        elif "exposed_s" in values:
            parts_s["transfer_s"] = values["exposed_s"]
        # On a GPU the host may be ahead of the device, so that the parts of a single step can be longer than
        # the step.
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
    """Return the mean parts of the steps whose time is neither among the shortest nor the longest quarter.

    Means add up to the mean step, as medians do not; and a step in which the machine did something else does
    not count. Beside the parts there is `hidden_s` where it is known.
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
    """Return the rank that was last most often, and the share of the steps in which it was; None where no
    buckets were sent, and for a single rank, for which nobody waits."""
    if len({parts.rank for parts in steps}) < 2:
        return None
    by_step = {parts.step: parts.last_rank for parts in steps if parts.last_rank is not None}
    if not by_step:
        return None
    ((rank, count),) = Counter(by_step.values()).most_common(1)
    return rank, count / len(by_step)
