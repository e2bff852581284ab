"""The measurements of a study: each repeat of each point, and the medians of points with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from nbgpu.performance import laws

Interval = laws.Interval
_NUM_RESAMPLES = 500
_SEED = 0
_UNSTEADY = 1.1
"""Repeats whose medians differ by more than this factor are unsteady."""


@dataclass(frozen=True)
class Measured:
    """One repeat of one point of a study: a run without its first steps."""

    point: int
    repeat: int
    step_s: tuple[float, ...]
    """The time of each step until the last rank had finished it; empty if the run failed."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """The mean time of each part of a step over the ranks and over the middle half of the steps."""
    slowest: tuple[int, float] | None = None
    """The rank for which the others waited most often, and the share of the steps in which they waited."""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, mean of the ranks' losses) for every step of the run, also for the first ones."""
    parameters: int = 0
    """The number of the model's parameters; 0 if it is not known."""
    seconds: float = 0.0
    """The wall time of the repeat, with everything before and after the steps."""
    why_failed: str = ""


@dataclass(frozen=True)
class PointSummary:
    """The repeats of one point taken together."""

    value: Any
    ranks: int
    samples_per_step: int
    num_repeats: int
    """The number of repeats that were measured."""
    step_s: float
    """The median time of all steps of all repeats."""
    step_between_s: Interval
    relative: float
    """Samples per second, divided by those of the reference, which is the measured point with the fewest
    ranks."""
    relative_between: Interval
    ideal: float
    """The value of `relative` if every rank were as fast as the ranks of the reference."""
    parts_s: Mapping[str, float]
    slowest: tuple[int, float] | None
    unsteadiness: float
    """The largest median step time of a repeat, divided by the smallest."""
    why_failed: str
    """Why a repeat failed; empty if none did."""
    parameters: int = 0
    """The number of the model's parameters; 0 if it is not known."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return self.samples_per_step / self.step_s

    @property
    def samples_between(self) -> Interval:
        """The interval of the samples per second."""
        return self.samples_per_step / self.step_between_s[1], self.samples_per_step / self.step_between_s[0]

    @property
    def efficiency(self) -> float:
        """Samples per second of each rank, divided by those of a rank of the reference."""
        return self.relative / self.ideal

    @property
    def is_reference(self) -> bool:
        """Whether the others are compared with this point."""
        return self.relative_between == (1.0, 1.0)

    @property
    def is_beyond_ranks(self) -> bool:
        """Whether the speed-up exceeds the number of ranks, which more ranks alone cannot explain."""
        return self.ideal > 1 and self.relative_between[0] > self.ideal

    @property
    def is_unsteady(self) -> bool:
        """Whether the repeats differ so much that something else took part of the machine."""
        return self.unsteadiness > _UNSTEADY


@dataclass(frozen=True)
class Gap:
    """A point without a measurement."""

    value: Any
    ranks: int
    why: str
    """Why it failed; empty if it was not tried yet."""


def summarise(
    points: Sequence[tuple[Any, int, int]], measured: Sequence[Measured]
) -> list[PointSummary | Gap]:
    """Combine the repeats of each point into medians, and compare each point with the measured one that has
    the fewest ranks.

    Intervals are those of resampling: repeats are drawn with replacement, and steps within each of them, so
    that repeats that differ widen the interval.

    Args:
        points: the value, the ranks and the samples of a step of each point, in order of their numbers.
        measured: the repeats, in any order.
    """
    by_point: dict[int, list[Measured]] = {number: [] for number in range(len(points))}
    for repeat in measured:
        by_point[repeat.point].append(repeat)
    resampled = {
        number: _resampled_medians([repeat.step_s for repeat in repeats if repeat.step_s])
        for number, repeats in by_point.items()
        if any(repeat.step_s for repeat in repeats)
    }
    if not resampled:
        return [_gap(points[number], repeats) for number, repeats in by_point.items()]
    first = min(resampled, key=lambda number: points[number][1])
    first_s = _median_step_s(by_point[first])
    summaries: list[PointSummary | Gap] = []
    for number, repeats in by_point.items():
        if number not in resampled:
            summaries.append(_gap(points[number], repeats))
            continue
        value, ranks, samples = points[number]
        share = samples / points[first][2]
        step_s = _median_step_s(repeats)
        medians = [median(repeat.step_s) for repeat in repeats if repeat.step_s]
        summaries.append(
            PointSummary(
                value=value,
                ranks=ranks,
                samples_per_step=samples,
                num_repeats=len(medians),
                step_s=step_s,
                step_between_s=laws.interval(resampled[number].tolist()),
                relative=first_s / step_s * share,
                relative_between=(1.0, 1.0)
                if number == first
                else laws.interval((resampled[first] / resampled[number] * share).tolist()),
                ideal=ranks / points[first][1],
                parts_s=_mean_parts(repeats),
                slowest=_slowest(repeats),
                unsteadiness=max(medians) / min(medians),
                why_failed=next((repeat.why_failed for repeat in repeats if repeat.why_failed), ""),
                parameters=max(repeat.parameters for repeat in repeats),
            )
        )
    return summaries


def differ_in_size(summary: Sequence[PointSummary | Gap]) -> bool:
    """Return whether the models of the measured points have different numbers of parameters, all of them
    known."""
    sizes = {point.parameters for point in summary if isinstance(point, PointSummary)}
    return len(sizes) > 1 and 0 not in sizes


def _gap(point: tuple[Any, int, int], repeats: Sequence[Measured]) -> Gap:
    return Gap(point[0], point[1], next((repeat.why_failed for repeat in repeats if repeat.why_failed), ""))


def _median_step_s(repeats: Sequence[Measured]) -> float:
    return median(seconds for repeat in repeats for seconds in repeat.step_s)


def _resampled_medians(repeats: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the median step time of each resampling, in which repeats and the steps within each of them are
    drawn with replacement. Shape: (resamples,)."""
    drawing = np.random.default_rng(_SEED)
    steps = [np.asarray(repeat) for repeat in repeats]
    medians = []
    for _ in range(_NUM_RESAMPLES):
        chosen = [steps[i] for i in drawing.integers(len(steps), size=len(steps))]
        drawn = [repeat[drawing.integers(len(repeat), size=len(repeat))] for repeat in chosen]
        medians.append(np.median(np.concatenate(drawn)))
    return np.asarray(medians)


def _mean_parts(repeats: Sequence[Measured]) -> dict[str, float]:
    measured = [repeat.parts_s for repeat in repeats if repeat.parts_s]
    names = dict.fromkeys(name for parts in measured for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in measured) / len(measured) for name in names}


def _slowest(repeats: Sequence[Measured]) -> tuple[int, float] | None:
    """Return the rank that was slowest in the most steps over all repeats, and the mean share of these
    steps."""
    shares: dict[int, float] = {}
    slowest = [repeat.slowest for repeat in repeats if repeat.slowest is not None]
    for rank, share in slowest:
        shares[rank] = shares.get(rank, 0.0) + share / len(slowest)
    return max(shares.items(), key=lambda item: item[1]) if shares else None
