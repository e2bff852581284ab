"""What bounds a run, in sentences with the numbers in them, and what to change first.

Everything said follows from what the ranks recorded of their steps. What a change would bring is worked out
from the same times: the part that the change acts on shrinks as the change makes it, and all else stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from nbgpu.performance.step_parts import MOSTLY, StepParts, middle_half, slowest_rank
from nbgpu.text.ranks import named_ranks

Bound = Literal["data", "computation", "communication", "imbalance", "validation", "checkpoints", "other"]

_WORTH_NAMING = 0.1
"""The share of the time from which on something is worth changing."""
_WORTH_SAYING = 0.02
"""The share of the time from which on something is named."""
_ENOUGH = 0.1
"""The share of the time that validations or checkpoints should take at most."""


@dataclass(frozen=True)
class Observed:
    """What the ranks recorded of a run."""

    steps: Sequence[StepParts]
    """The steps that count, of all ranks."""
    between_s: Mapping[str, float]
    """The time between steps by what it was spent on ('validation', 'checkpoints', 'other'), on average for
    one step."""
    samples_per_step: int
    settings: Mapping[str, Any]
    """The run's settings by name."""


@dataclass(frozen=True)
class Advice:
    """One change, and what it would bring."""

    text: str
    settings: Mapping[str, Any]
    """The settings to change, by name; empty where the cause is not one of the run's settings."""
    step_s: float
    """What a step would take with it, with the time between steps, for as many samples as now."""
    relative: float
    """The samples per second with it by those of now."""


@dataclass(frozen=True)
class Explanation:
    """What bounds a run. Prints as sentences."""

    bound: Bound
    sentences: Sequence[str]
    step_s: float
    """What a step takes on average, with the time between steps."""
    advice: Sequence[Advice] = field(default=())
    """What to change, the most useful first; empty where nothing would help."""

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *(advice.text for advice in self.advice)])

    __repr__ = __str__


def explain(observed: Observed) -> Explanation:
    """Say what bounds a run.

    Args:
        observed: at least one step of each rank.
    """
    parts = middle_half(observed.steps)
    ranks = sorted({step.rank for step in observed.steps})
    spent_s = {
        "computation": parts["forward_s"] + parts["backward_s"] + parts["optimizer_s"],
        "data": parts["data_s"],
        "waiting for one another": parts.get("waiting_s", 0.0),
        "communication": parts.get("transfer_s", 0.0),
        "validation": observed.between_s.get("validation", 0.0),
        "checkpoints": observed.between_s.get("checkpoints", 0.0),
        "other": parts["other_s"] + observed.between_s.get("other", 0.0),
    }
    step_s = sum(spent_s.values())
    # Computation is what the time is for. It bounds a run where nothing else is worth changing.
    causes: dict[Bound, float] = {
        "data": spent_s["data"],
        "communication": spent_s["communication"],
        "imbalance": _imbalance_s(observed.steps, len(ranks)),
        "validation": spent_s["validation"],
        "checkpoints": spent_s["checkpoints"],
        "other": spent_s["other"],
    }
    worst = max(causes, key=lambda cause: causes[cause])
    bound: Bound = worst if causes[worst] >= _WORTH_NAMING * step_s else "computation"
    seen = _Seen(observed, parts, spent_s, causes | {"computation": spent_s["computation"]}, step_s, ranks)
    advice = tuple(sorted(seen.advice(bound), key=lambda each: each.step_s))
    return Explanation(bound, tuple(seen.sentences(bound)), step_s, advice)


@dataclass(frozen=True)
class _Seen:
    observed: Observed
    parts: Mapping[str, float]
    spent_s: Mapping[str, float]
    """By what it was spent on; all of a step and of the time between two steps."""
    causes_s: Mapping[Bound, float]
    """By how much a step would be shorter without each cause."""
    step_s: float
    ranks: Sequence[int]

    def sentences(self, bound: Bound) -> Iterator[str]:
        yield self._first(bound)
        rest = {n: s for n, s in self.spent_s.items() if n != bound and s >= _WORTH_SAYING * self.step_s}
        if rest:
            ordered = sorted(rest, key=lambda name: -rest[name])
            named = ", ".join(
                f"{name} {_ms(rest[name])} ({rest[name] / self.step_s:.0%})" for name in ordered
            )
            yield f"Of the {_ms(self.step_s)} of a step, on average over the ranks: {named}."
        hidden_s = self.parts.get("hidden_s", 0.0)
        if hidden_s >= 0.01 * self.step_s:
            yield f"The backward pass hides {_ms(hidden_s)} of the exchange of gradients."

    def _first(self, bound: Bound) -> str:
        seconds = self.causes_s[bound]
        share = seconds / self.step_s
        match bound:
            case "data":
                return f"Data bound this run: a step waits {_ms(seconds)} for them, {share:.0%} of its time."
            case "communication":
                return (
                    f"Communication bounds this run: {_ms(seconds)} of a step, {share:.0%}, is an exchange of gradients "
                    "that the backward pass does not hide."
                )
            case "imbalance":
                rank, often = slowest_rank(self.observed.steps) or (0, 0.0)
                others = named_ranks(each for each in self.ranks if each != rank)
                waits = "waits" if len(self.ranks) == 2 else "wait"
                return (
                    f"Imbalance bounds this run: {others} {waits} {_ms(seconds)} of a step, {share:.0%}, for rank {rank}, "
                    f"which is last in {often:.0%} of the steps."
                )
            case "validation":
                return f"Validation bounds this run: {_ms(seconds)} for each step, {share:.0%} of the time."
            case "checkpoints":
                return f"Checkpoints bound this run: {_ms(seconds)} for each step, {share:.0%} of the time."
            case "other":
                return (
                    f"None of a step's parts bounds this run: {_ms(seconds)} of a step, {share:.0%}, is neither data, "
                    "computation nor communication, such as other work on this machine."
                )
            case "computation":
                return f"Computation bounds this run: {_ms(seconds)} of a step, {share:.0%}, which is what it is for."

    def advice(self, bound: Bound) -> Iterator[Advice]:
        settings = self.observed.settings
        match bound:
            case "data":
                yield from self._advice_on_data(settings)
            case "communication":
                yield from self._advice_on_communication(settings)
            case "imbalance":
                without_s = self.step_s - self.causes_s["imbalance"]
                rank, _ = slowest_rank(self.observed.steps) or (0, 0.0)
                yield self._advice(f"If rank {rank} were as fast as the others", {}, without_s)
            case "validation":
                yield from self._less_often("val_every", "validation", settings)
            case "checkpoints":
                yield from self._less_often("checkpoint_every", "checkpoints", settings)
            case "computation" | "other":
                pass

    def _advice_on_data(self, settings: Mapping[str, Any]) -> Iterator[Advice]:
        without_s = self.step_s - self.spent_s["data"]
        if settings.get("cache_rate") is not None and settings["cache_rate"] < 1 and settings.get("data"):
            yield self._advice("With every volume in memory (cache_rate=1)", {"cache_rate": 1.0}, without_s)
        elif "num_workers" in settings:
            # Workers read while the ranks compute. They have to be so many that a batch is read in the time
            # of a step.
            busy_s = max(without_s, 1e-9)
            workers = max(1, round(0.5 + (self.spent_s["data"] + busy_s) / busy_s))
            if workers > (settings["num_workers"] or 0):
                text = f"With {workers} workers that read while the ranks compute (num_workers={workers})"
                yield self._advice(text, {"num_workers": workers}, without_s)

    def _advice_on_communication(self, settings: Mapping[str, Any]) -> Iterator[Advice]:
        exposed_s = self.spent_s["communication"]
        if settings.get("strategy") == "ddp" and settings.get("comm_hook") == "none":
            exchange_s = exposed_s + self.parts.get("hidden_s", 0.0)
            # Half the bytes take half the time, but for latencies; what is hidden now stays hidden.
            without_s = self.step_s - min(exposed_s, exchange_s / 2)
            yield self._advice(
                "With gradients of 16 bits on the way (comm_hook='fp16')", {"comm_hook": "fp16"}, without_s
            )
        accumulate = settings.get("accumulate", 1)
        # Twice the micro-batches, and as many exchanges: half of one for as many samples as now.
        halved_s = self.step_s - (exposed_s + self.parts["optimizer_s"]) / 2
        changed = {"accumulate": 2 * accumulate}
        yield self._advice(
            f"With twice as many micro-batches in a step (accumulate={2 * accumulate})", changed, halved_s
        )

    def _less_often(self, name: str, what: Bound, settings: Mapping[str, Any]) -> Iterator[Advice]:
        every = settings.get(name) or 0
        if not every:
            return
        seconds = self.causes_s[what]
        factor = 1
        while seconds / factor > _ENOUGH * (self.step_s - seconds + seconds / factor):
            factor *= 2
        without_s = self.step_s - seconds + seconds / factor
        yield self._advice(
            f"With {name}={every * factor} in place of {every}", {name: every * factor}, without_s
        )

    def _advice(self, condition: str, settings: Mapping[str, Any], step_s: float) -> Advice:
        samples = self.observed.samples_per_step
        return Advice(
            f"{condition}, a step would at best take {_ms(step_s)} in place of {_ms(self.step_s)}, which is {samples / step_s:.4g} "
            f"samples per second in place of {samples / self.step_s:.4g}.",
            settings,
            step_s,
            self.step_s / step_s,
        )


def _imbalance_s(steps: Sequence[StepParts], num_ranks: int) -> float:
    """By how much a step would be shorter if the rank that is last most often were as fast as the others.

    Ranks take turns to be last even where they are alike. Only what the others wait for that one rank counts.
    """
    found = slowest_rank(steps)
    if found is None or num_ranks < 2:
        return 0.0
    rank, share = found
    if share < MOSTLY:
        return 0.0
    waited = [step.parts_s["waiting_s"] for step in steps if step.last_rank == rank and step.rank != rank]
    return median(waited) * share if waited else 0.0


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
