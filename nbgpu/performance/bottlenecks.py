"""The bottleneck of a run, in sentences with the numbers in them, and what to change first.

The bottleneck is the largest part of a step's time. Mostly that is computation, which is what the time is
for; what to change first is the largest part that a change can make smaller.

Everything follows from the times that the ranks recorded of their steps, and from the link where it is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, Literal

from nbgpu.performance.other_buckets import ExchangeModel
from nbgpu.performance.step_parts import MOSTLY, STATISTICS, StepParts, middle_half, slowest_rank
from nbgpu.text.html import shown_as_html
from nbgpu.text.ranks import named_ranks

Bound = Literal[
    "data",
    "computation",
    "communication",
    "statistics",
    "imbalance",
    "validation",
    "checkpoints",
    "cores",
    "other",
]

_WORTH_CHANGING = 0.1
"""The smallest share of the time that makes a cause worth changing."""
_WORTH_LISTING = 0.02
"""The smallest share of the time that makes an activity worth listing."""
_LEAST_HIDDEN_SHARE = 0.01
"""The smallest share of the time that makes hidden communication worth a sentence."""

_BOUNDS: Mapping[Bound, str] = {
    "data": "Data bound this run",
    "computation": "Computation bounds this run",
    "communication": "Communication bounds this run",
    "statistics": "BatchNorm's statistics bound this run",
    "imbalance": "Imbalance bounds this run",
    "validation": "Validation bounds this run",
    "checkpoints": "Checkpoints bound this run",
    "other": "None of a step's parts bounds this run",
}
_NAMES: Mapping[Bound, str] = {
    "data": "the data",
    "communication": "communication",
    "statistics": "BatchNorm's statistics",
    "imbalance": "the imbalance",
    "validation": "validation",
    "checkpoints": "checkpoints",
    "cores": "the cores",
}
_ACTIVITY_OF_CAUSE: Mapping[Bound, str] = {
    "statistics": "BatchNorm's statistics",
    "imbalance": "waiting for one another",
}
"""The activity of `TimeBreakdown.spent_s` that belongs to a cause, for causes with another name than their
activity."""


@dataclass(frozen=True)
class Observed:
    """The times that the ranks recorded of a run, with the settings and the link."""

    steps: Sequence[StepParts]
    """The steps to explain, of all ranks."""
    between_s: Mapping[str, float]
    """The mean time between two steps in seconds, by activity: 'validation', 'checkpoints', 'other'."""
    samples_per_step: int
    settings: Mapping[str, Any]
    """The run's settings by name."""
    exchange: ExchangeModel | None = None
    """The exchange of gradients over the run's link; None where the link is not known, or no buckets were
    recorded."""
    cores_each: float = 0.0
    """The number of cores that a CPU rank used on average."""
    coreless_share: float = 0.0
    """The mean share of the time for which a CPU rank was ready to compute but had no core."""


@dataclass(frozen=True)
class Advice:
    """One change, and its estimated effect."""

    text: str
    settings: Mapping[str, Any]
    """The settings to change, by name; empty where the cause is not one of the run's settings."""
    step_s: float
    """The time of a step after the change, with the time between steps, for the same number of samples."""
    relative: float
    """The samples per second after the change, divided by those of now."""


@dataclass(frozen=True)
class Explanation:
    """The bottleneck of a run, and advice. Prints as sentences."""

    bound: Bound
    """The largest part of the time."""
    change_first: Bound | None
    """The largest part that a change can make smaller; None if no such part takes a tenth of the time."""
    sentences: Sequence[str]
    step_s: float
    """The mean time of a step in seconds, with the time between steps."""
    spent_s: Mapping[str, float]
    """The seconds of `step_s` by activity: 'computation', 'data', 'validation', 'checkpoints' and so on."""
    advice: Sequence[Advice] = field(default=())
    """The changes, the most useful first; empty where nothing would help."""

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *(advice.text for advice in self.advice)])

    __repr__ = __str__
    _repr_html_ = shown_as_html


@dataclass(frozen=True)
class Lagging:
    """A rank for which the others wait."""

    rank: int
    share: float
    """The share of the steps in which this rank is last."""
    seconds: float
    """The time by which a step would be shorter if this rank were as fast as the others."""
    data_s: float
    """The time that this rank waits for its data."""
    extra_data_s: float
    """The time by which that is longer than for the others; below 0 if it is shorter."""


@dataclass(frozen=True)
class TimeBreakdown:
    """The time of a mean step by activity, and the time that each cause adds to it."""

    observed: Observed
    parts: Mapping[str, float]
    """The parts of a step in seconds, mean over the ranks (`step_parts.middle_half`)."""
    spent_s: Mapping[str, float]
    """Seconds by activity. They add up to a step and the time until the next one."""
    causes_s: Mapping[Bound, float]
    """The seconds by which a step would be shorter without each cause. Causes may overlap."""
    lagging: Lagging | None
    """The slowest rank; None if the ranks take turns at being the slowest."""

    @property
    def step_s(self) -> float:
        return sum(self.spent_s.values())

    @property
    def ranks(self) -> list[int]:
        return sorted({step.rank for step in self.observed.steps})

    def bound(self) -> Bound:
        """Return the largest part of the time."""
        # The time without a core is already contained in the other parts.
        parts = {cause: seconds for cause, seconds in self.causes_s.items() if cause != "cores"}
        if self.lagging is None:
            # If the ranks take turns at being the slowest, no change removes the waiting, and as a cause it
            # counts as 0. It takes time all the same.
            parts["imbalance"] = self.spent_s["waiting for one another"]
        return max(parts, key=parts.__getitem__)

    def change_first(self) -> Bound | None:
        """Return the largest part that a change can make smaller; None if no such part takes a tenth of the
        time."""
        causes = [
            cause
            for cause, seconds in self.causes_s.items()
            if cause not in ("computation", "other") and seconds >= _WORTH_CHANGING * self.step_s
        ]
        return max(causes, key=self.causes_s.__getitem__, default=None)

    def sentences(self) -> Iterator[str]:
        """Yield the largest part of a step (its bound), the largest part that a change can make smaller, the
        lack of cores, the remaining parts, and the communication that the backward pass hides."""
        bound, first = self.bound(), self.change_first()
        if bound == "computation" and first is not None:
            yield f"Computation takes the largest part of a step: {self._describe(bound)}."
        else:
            yield f"{_BOUNDS[bound]}: {self._describe(bound)}."
        if first is not None and first != bound:
            clause = self._describe(first)
            yield f"Change this first: {_NAMES[first]}. {clause[0].upper()}{clause[1:]}."
        if "cores" not in (first, bound) and self.causes_s["cores"] >= _WORTH_CHANGING * self.step_s:
            yield f"All of these times are longer than they need be: {self._describe('cores')}."
        named = {_ACTIVITY_OF_CAUSE.get(cause, cause) for cause in (bound, first) if cause is not None}
        if rest := self._list_other_activities(named):
            mean = ", on average over the ranks" if len(self.ranks) > 1 else ""
            yield f"Of the {in_ms(self.step_s)} of a step{mean}: {rest}."
        hidden_s = self.parts.get("hidden_s", 0.0)
        if hidden_s >= _LEAST_HIDDEN_SHARE * self.step_s:
            yield f"The backward pass hides {in_ms(hidden_s)} of the exchange of gradients."
        if first is None:
            yield "Nothing that a change can make smaller takes a tenth of the time, so that there is nothing to change first."

    def _list_other_activities(self, named: Collection[str]) -> str:
        """Return the activities that the sentences have not yet named, with their times, the largest first.
        Short ones are left out."""
        parts = [(name, seconds) for name, seconds in self.spent_s.items() if seconds and name not in named]
        parts.sort(key=lambda part: -part[1])
        listed = [part for part in parts if part[1] >= _WORTH_LISTING * self.step_s] or parts[:1]
        return ", ".join(f"{name} {in_ms(seconds)} ({seconds / self.step_s:.0%})" for name, seconds in listed)

    def _share(self, cause: Bound) -> str:
        """Return the time of a cause and its share of a step, such as '12 ms of a step, 34%'."""
        seconds = self.causes_s[cause]
        return f"{in_ms(seconds)} of a step, {seconds / self.step_s:.0%}"

    def _describe(self, cause: Bound) -> str:
        """Return a clause about the time that a cause adds to a step, with its numbers."""
        share, time = self._share(cause), in_ms(self.causes_s[cause])
        percent = f"{self.causes_s[cause] / self.step_s:.0%}"
        match cause:
            case "data":
                who, seconds = self._wait_for_data()
                return f"{who} {in_ms(seconds)} for them, {seconds / self.step_s:.0%} of its time"
            case "communication":
                return f"{share}, is an exchange of gradients that the backward pass does not hide{self._exchange_limit()}"
            case "statistics":
                return f"{share}, is their exchange between the ranks, which no computation hides"
            case "imbalance":
                return self._describe_imbalance()
            case "validation" | "checkpoints":
                return f"{time} for each step, {percent} of the time"
            case "cores":
                ranks = "each rank" if len(self.ranks) > 1 else "the rank"
                return (
                    f"for {share}, {ranks} was ready to compute and had no core, and used {self.observed.cores_each:.2g} "
                    "cores. Other programs had them, or there are more ranks and threads than cores"
                )
            case "other":
                parts = (
                    "data, computation nor communication" if len(self.ranks) > 1 else "data nor computation"
                )
                return f"{share}, is neither {parts}, such as other work on this machine"
            case "computation":
                return f"{share}, which is what it is for"

    def _describe_imbalance(self) -> str:
        """Return a clause about the ranks that wait for the slowest rank, or for changing ranks."""
        lagging = self.lagging
        if lagging is None:
            seconds = self.spent_s["waiting for one another"]
            return (
                f"a rank waits {in_ms(seconds)} of a step, {seconds / self.step_s:.0%}, for the others, which take turns at "
                "being last, as ranks do that share cores"
            )
        others = named_ranks(rank for rank in self.ranks if rank != lagging.rank)
        waits = "waits" if len(self.ranks) == 2 else "wait"
        return (
            f"{others} {waits} {self._share('imbalance')}, for rank {lagging.rank}, which is last in "
            f"{lagging.share:.0%} of the steps"
        )

    def _wait_for_data(self) -> tuple[str, float]:
        """Return the beginning of a sentence about waiting for data, up to its verb, and the time of the
        wait. They are about the slowest rank if its data explain at least half of the wait, by coming later
        than those of the others; else about the step."""
        lagging = self.lagging
        if lagging is None or lagging.extra_data_s < self.causes_s["data"] / 2:
            return "a step waits", self.causes_s["data"]
        return f"rank {lagging.rank}, for which the others wait, itself waits in each step", lagging.data_s

    def _exchange_limit(self) -> str:
        """Return a sentence on whether the link's latency or its rate takes most of the exchange; empty if
        the link is not known."""
        exchange = self.observed.exchange
        if exchange is None:
            return ""
        latency_s, busy_s = exchange.latency_s(), exchange.busy_s()
        if latency_s > busy_s / 2:
            return f". Most of the exchange is the latency of its {len(exchange.buckets)} buckets, {in_ms(latency_s)}"
        return (
            f". Most of the exchange is the link's rate: {exchange.num_bytes / 1e6:.3g} MB need "
            f"{in_ms(busy_s - latency_s)}"
        )


def break_down(observed: Observed) -> TimeBreakdown:
    """Attribute the time of a mean step to activities and to causes.

    Args:
        observed: at least one step of each rank.
    """
    parts = middle_half(observed.steps)
    ranks = sorted({step.rank for step in observed.steps})
    data_s = {rank: middle_half([s for s in observed.steps if s.rank == rank])["data_s"] for rank in ranks}
    lagging = _lagging(observed.steps, data_s)
    statistics_s = exchanged_s = parts.get(STATISTICS, 0.0)
    if statistics_s and lagging is not None:
        # If one rank is slow, the others spend most of these exchanges waiting for it. If none is, ranks wait
        # only because BatchNorm synchronises them so often, and all of the time counts as exchange.
        exchanged_s = min(statistics_s, _pure_exchange_s(observed.steps))
    spent_s = {
        "computation": parts["forward_s"] + parts["backward_s"] + parts["optimizer_s"],
        "data": parts["data_s"],
        "waiting for one another": parts.get("waiting_s", 0.0) + statistics_s - exchanged_s,
        "communication": parts.get("transfer_s", 0.0),
        "BatchNorm's statistics": exchanged_s,
        "validation": observed.between_s.get("validation", 0.0),
        "checkpoints": observed.between_s.get("checkpoints", 0.0),
        "other": parts["other_s"] + observed.between_s.get("other", 0.0),
    }
    causes_s: dict[Bound, float] = {
        # The others wait for the rank whose data come last.
        "data": max(data_s.values()),
        "communication": spent_s["communication"],
        "statistics": spent_s["BatchNorm's statistics"],
        "imbalance": 0.0 if lagging is None else max(0.0, lagging.seconds - max(0.0, lagging.extra_data_s)),
        "validation": spent_s["validation"],
        "checkpoints": spent_s["checkpoints"],
        "cores": observed.coreless_share * sum(spent_s.values()),
        "other": spent_s["other"],
        "computation": spent_s["computation"],
    }
    return TimeBreakdown(observed, parts, spent_s, causes_s, lagging)


def _lagging(steps: Sequence[StepParts], data_s: Mapping[int, float]) -> Lagging | None:
    """Return the rank that is last in most steps; None if the ranks take turns, as equally fast ranks do.

    Args:
        steps: the parts of all ranks' steps.
        data_s: the mean time that each rank waits for its data, by rank.
    """
    slowest = slowest_rank(steps)
    if slowest is None or len(data_s) < 2:
        return None
    rank, share = slowest
    seconds = [step.parts_s["waiting_s"] for step in steps if step.last_rank == rank and step.rank != rank]
    if any(STATISTICS in step.parts_s for step in steps):
        # Every exchange of statistics synchronises the ranks, so the others wait there and not for gradients.
        rank, share, seconds = _last_for_statistics(steps)
    if share < MOSTLY or not seconds:
        return None
    others_s = [wait_s for other, wait_s in data_s.items() if other != rank]
    return Lagging(rank, share, median(seconds) * share, data_s[rank], data_s[rank] - mean(others_s))


def _last_for_statistics(steps: Sequence[StepParts]) -> tuple[int, float, list[float]]:
    """Return the rank that comes last to the exchange of statistics in most steps, the share of these steps,
    and for each step the seconds by which the others wait longer. The last rank is the one that waits
    least."""
    by_step = _statistics_by_step(steps)
    last = [min(waits_s, key=waits_s.__getitem__) for waits_s in by_step]
    rank = max(set(last), key=last.count)
    longer_s = [
        mean(seconds - waits_s[rank] for other, seconds in waits_s.items() if other != rank)
        for waits_s in by_step
    ]
    return rank, last.count(rank) / len(last), longer_s


def _pure_exchange_s(steps: Sequence[StepParts]) -> float:
    """Estimate the time that the exchange of statistics takes once all ranks have joined it: the time that
    the last rank spends in it."""
    return median(min(waits_s.values()) for waits_s in _statistics_by_step(steps))


def _statistics_by_step(steps: Sequence[StepParts]) -> list[dict[int, float]]:
    """Return for each step the seconds that each rank spends in exchanges of statistics, by rank."""
    by_step: dict[int, dict[int, float]] = {}
    for step in steps:
        by_step.setdefault(step.step, {})[step.rank] = step.parts_s.get(STATISTICS, 0.0)
    return list(by_step.values())


def in_ms(seconds: float) -> str:
    """Return a time as text: in milliseconds below one second, else in seconds."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
