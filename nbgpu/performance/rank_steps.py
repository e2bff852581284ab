"""What each rank did in a step, moment by moment, and the path through the ranks that took the step's time.

All moments are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from nbgpu.protocol.records import MAX_NUMBER

Kind = Literal[
    "data",
    "forward",
    "backward",
    "optimizer",
    "other",
    "waiting",
    "transfer",
    "blocked",
    "exchange",
    "collective",
]
"""The activity of a rank: it waits for its data ('data'), computes ('forward', 'backward', 'optimizer',
'other'), waits in a collective until the last rank has joined ('waiting'), or waits for the transfer that
follows ('transfer'). In a cell whose collectives cannot be matched between the ranks it is 'blocked'
(cell_steps.py). Beside these, 'exchange' is a collective of gradients in progress, and 'collective' is any
other one."""

_KINDS: dict[str, Kind] = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "beside": "backward",  # a discriminator's pass, which follows on the model's
    "optimizer": "optimizer",
}
"""By the trainer's name of a part of the step; all other parts are 'other'."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in which a rank did one thing."""

    kind: Kind
    rank: int
    begin_s: float
    end_s: float
    num_bytes: int = 0
    """The size of the transferred data; 0 for other kinds."""
    name: str = ""
    """The operation, such as 'all_reduce'; empty in a run."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """An interval in which a rank has nothing to compute and waits for the result of a collective."""

    ready_s: float
    """When the rank had nothing more to compute; in a run, when its gradients were ready."""
    arrived_s: float
    """When the result of the collective had arrived."""
    joined_before_s: float | None = None
    """When the rank called the collective, if that was before it began to wait."""

    @property
    def joined_s(self) -> float:
        """When the rank's data were available to the collective, which cannot end without them."""
        return self.ready_s if self.joined_before_s is None else self.joined_before_s


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    step: int
    rank: int
    work: tuple[Span, ...]
    """Data and computation, in order."""
    sent: tuple[Span, ...]
    """The transfers, in the order in which they became ready; empty if they were not recorded one by one."""
    blocked: tuple[Blocked, ...]

    @property
    def begin_s(self) -> float:
        return self.work[0].begin_s

    @property
    def end_s(self) -> float:
        return max([self.work[-1].end_s, *(blocked.arrived_s for blocked in self.blocked)])


def from_moments(step: int, rank: int, detail: Mapping[str, Any], shift_s: float = 0.0) -> RankStep | None:
    """Read one step of a rank from the detail of its event of the kind TIMELINE; None if that is damaged.

    Args:
        step: the number of the step.
        rank: the rank.
        detail: `marks` with (part, its beginning in seconds), where the last mark is the end of the step, and
            `sent` with (ready, arrived, bytes) of each bucket.
        shift_s: added to all times, to convert them to another clock.
    """
    read = _read(detail)
    if read is None:
        return None
    marks = [(part, at_s + shift_s) for part, at_s in read[0]]
    sent = tuple(
        Span("exchange", rank, ready_s + shift_s, arrived_s + shift_s, num_bytes)
        for ready_s, arrived_s, num_bytes in read[1]
    )
    work: list[Span] = []
    blocked: list[Blocked] = []
    for (part, begin_s), (_, end_s) in pairwise(marks):
        buckets = [span for span in sent if begin_s <= span.begin_s < end_s]
        kind = _KINDS.get(part, "other")
        if not buckets or kind == "other":
            work.append(Span(kind, rank, begin_s, end_s))
            continue
        # The rank computes until the last bucket is ready, and then waits until the last one has arrived.
        # What follows of the model's backward pass only copies gradients, and what follows of a
        # discriminator's pass computes.
        ready_s = max(span.begin_s for span in buckets)
        arrived_s = min(end_s, max(span.end_s for span in buckets))
        blocked.append(Blocked(ready_s, arrived_s))
        work.append(Span(kind, rank, begin_s, ready_s))
        work.append(Span("other" if part == "backward" else kind, rank, arrived_s, end_s))
    return RankStep(step, rank, tuple(work), sent, tuple(blocked))


def from_parts(step: int, rank: int, values: Mapping[str, float], shift_s: float = 0.0) -> RankStep | None:
    """Build one step of a rank from the durations in its record: one span for each part, without transfers.

    Args:
        step: the number of the step.
        rank: the rank.
        values: the values of the step's record.
        shift_s: added to all times, to convert them to another clock.

    Returns:
        None if the record lacks the parts.
    """
    if "forward_s" not in values or "begun_at_s" not in values:
        return None
    begun_s = values["begun_at_s"] + shift_s
    forward_s, backward_s = values["forward_s"], values["backward_s"]
    fetched_s = begun_s + values.get("data_s", 0.0)
    computed_s = (
        values["ready_at_s"] + shift_s if "ready_at_s" in values else fetched_s + forward_s + backward_s
    )
    arrived_s = computed_s + values.get("exposed_s", 0.0)
    times: list[tuple[Kind, float]] = [
        ("data", begun_s),
        ("other", fetched_s),
        ("forward", computed_s - backward_s - forward_s),
        ("backward", computed_s - backward_s),
        ("optimizer", arrived_s),
        ("other", arrived_s + values["optimizer_s"]),
    ]
    ends = [*(at_s for _, at_s in times[1:]), begun_s + values["step_s"]]
    # The backward pass ends when the gradients are ready; from then on the rank waits for the exchange.
    ends[3] = computed_s
    work = [
        Span(kind, rank, at_s, end_s) for (kind, at_s), end_s in zip(times, ends, strict=True) if end_s > at_s
    ]
    blocked = (Blocked(computed_s, arrived_s),) if "ready_at_s" in values else ()
    return RankStep(step, rank, tuple(work), (), blocked) if work else None


def _read(detail: Mapping[str, Any]) -> tuple[list[tuple[str, float]], list[tuple[float, float, int]]] | None:
    """Return the marks (part, moment) and the transfers (ready, arrived, bytes) of an event; None unless all
    types and orders are right, because the record may have been truncated or edited."""
    marks, sent = detail.get("marks"), detail.get("sent")
    if not (type(marks) is list and type(sent) is list and len(marks) > 1):
        return None
    if not all(type(m) is list and len(m) == 2 and type(m[0]) is str and _is_moment(m[1]) for m in marks):
        return None
    if not all(type(s) is list and len(s) == 3 and all(map(_is_moment, s)) for s in sent):
        return None
    if any(before[1] > after[1] for before, after in pairwise(marks)) or any(s[0] > s[1] for s in sent):
        return None
    return [(m[0], m[1]) for m in marks], [(s[0], s[1], int(s[2])) for s in sent]


def _is_moment(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_NUMBER  # type: ignore[operator]


def blocked_spans(ranks: Sequence[RankStep]) -> Iterator[Span]:
    """Yield the spans in which ranks were blocked. Each interval is divided in two: until the last rank has
    joined the collective ('waiting'), and from then on ('transfer').

    If the ranks were not blocked equally often, their collectives cannot be matched, and the whole interval
    counts as transfer.
    """
    can_match = len({len(rank.blocked) for rank in ranks}) == 1
    for rank in ranks:
        for index, blocked in enumerate(rank.blocked):
            all_joined_s = max(r.blocked[index].joined_s for r in ranks) if can_match else blocked.ready_s
            all_joined_s = min(max(all_joined_s, blocked.ready_s), blocked.arrived_s)
            if all_joined_s > blocked.ready_s:
                yield Span("waiting", rank.rank, blocked.ready_s, all_joined_s)
            if blocked.arrived_s > all_joined_s:
                yield Span("transfer", rank.rank, all_joined_s, blocked.arrived_s)


def critical_path(ranks: Sequence[RankStep], ends_on: int | None = None) -> list[Span]:
    """Return the path through the ranks of one step that determined its time, from the beginning to the end.

    The path is followed backwards from the end of a rank. At a collective in which that rank waited, the path
    takes the transfer and continues on the rank that joined last: to speed up any other rank would not have
    shortened the step.

    Args:
        ranks: one step of all ranks.
        ends_on: the rank on which the path ends, which is the rank on which the path of the next step begins;
            None for the rank that finished last.

    Returns:
        Spans of computation, of waiting for data and of transfers, without overlap.
    """
    current = max((r for r in ranks if ends_on in (None, r.rank)), key=lambda rank: rank.end_s)
    path: list[Span] = []
    now_s = current.end_s
    num_exchanges = min(len(rank.blocked) for rank in ranks)
    for index in reversed(range(num_exchanges)):
        arrived_s = current.blocked[index].arrived_s
        if arrived_s > now_s:
            # The path has already reached a moment before the end of this collective.
            continue
        path += reversed(_clipped(current, arrived_s, now_s))
        last = max(ranks, key=lambda rank: rank.blocked[index].joined_s)
        now_s = last.blocked[index].joined_s
        if arrived_s > now_s:
            path.append(Span("transfer", current.rank, now_s, arrived_s))
        current = last
    path += reversed(_clipped(current, current.begin_s, now_s))
    return path[::-1]


def _clipped(rank_step: RankStep, begin_s: float, end_s: float) -> list[Span]:
    """Return the parts of a rank's work that lie within an interval."""
    return [
        Span(span.kind, span.rank, max(span.begin_s, begin_s), min(span.end_s, end_s))
        for span in rank_step.work
        if span.begin_s < end_s and span.end_s > begin_s
    ]
