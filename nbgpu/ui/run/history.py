"""The history of a run for its panel: every series in bounded memory, and the events that get a mark.

A run may last for days. Each series therefore keeps a few thousand points. When it is full, half of the
points are dropped, but the lowest and the highest of each stretch of steps and of time stay, so that the past
has as many points as a chart has pixels, and no visible spike is ever lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nbgpu.protocol.records import (
    CLOCKS,
    DAMAGE,
    EXCHANGE_PARTS,
    STEP_MOMENTS,
    STEP_PARTS,
    TIMELINE,
    Event,
    Sample,
    is_learning_rate,
)

CAPACITY = 8192
"""The number of points that a series holds before half of them are dropped."""

_MIN_POINTS_OVER_BOTH = 100
"""Fewer points than this cover a short time, in which steps and seconds pass evenly."""

_SERIES_OF_NO_CHART = frozenset({*STEP_PARTS, *EXCHANGE_PARTS, *STEP_MOMENTS}) - {"data_s"}

_MARKED_STATES = frozenset({"paused", "failed"})

SeriesKey = tuple[int, str]
"""(rank, series name)"""


def keep_extremes(x: NDArray[np.float64], values: NDArray[np.float64], num_columns: int) -> NDArray[np.intp]:
    """The indices of the points that a picture with this many columns needs, in order.

    x is cut into equal stretches, such as the columns of a chart's pixels, and the lowest and the highest
    point of each are kept, as well as the very first and last point. Stretches with equal numbers of points
    would not do, because points that were thinned before would be thinned more each time, until nothing is
    left of a long run's beginning.

    Args:
        x: shape (N,), ascending.
        values: shape (N,).
        num_columns: at least 1.

    Returns:
        indices, ascending, shape (M,) with M <= 2 * num_columns + 2.
    """
    width = (x[-1] - x[0]) / num_columns or 1.0
    columns = np.minimum(((x - x[0]) / width).astype(np.intp), num_columns - 1)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    # argmin and argmax would return a NaN and so hide the extremes around it.
    low_side = np.where(np.isnan(values), np.inf, values)
    high_side = np.where(np.isnan(values), -np.inf, values)
    kept = [0, len(values) - 1]
    for start, end in pairwise([*starts.tolist(), len(values)]):
        kept += [int(start + low_side[start:end].argmin()), int(start + high_side[start:end].argmax())]
    return np.unique(np.array(kept))


@dataclass
class Series:
    """One number of one rank over time."""

    times_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def append(self, time_s: float, step: int, value: float) -> None:
        """Append a point. A step that was recorded before drops the points from there on, and a full series
        is thinned to half of its capacity."""
        if self.steps and step < self.steps[-1]:
            self._forget_from(step)
        self.times_s.append(time_s)
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) >= CAPACITY:
            half = self.thinned(CAPACITY // 2)
            self.times_s, self.steps, self.values = half.times_s, half.steps, half.values

    def _forget_from(self, step: int) -> None:
        """Drop the points from a step on, because a run that went back to a checkpoint does these steps
        again."""
        kept = bisect_left(self.steps, step)
        del self.times_s[kept:], self.steps[kept:], self.values[kept:]

    def extend(self, other: Series) -> None:
        """Append the points of another series."""
        for point in zip(other.times_s, other.steps, other.values, strict=True):
            self.append(*point)

    def thinned(self, max_points: int, over_time: bool = True) -> Series:
        """A copy with at most `max_points`, at least 4, that looks the same in a chart which is not too wide;
        this series itself where it has no more points.

        Args:
            max_points: the largest number of points in the copy.
            over_time: whether the x axis may be time as well as steps. They differ in a pause, which has no
                steps.
        """
        if len(self.values) <= max_points:
            return self
        axes: list[list[int] | list[float]] = [self.steps]
        if over_time and max_points >= _MIN_POINTS_OVER_BOTH:
            axes.append(self.times_s)
        values = np.asarray(self.values, dtype=np.float64)
        # `keep_extremes` returns at most 2 * num_columns + 2 points for each axis.
        num_columns = (max_points // len(axes) - 2) // 2
        kept = np.unique(
            np.concatenate([keep_extremes(np.asarray(x, np.float64), values, num_columns) for x in axes])
        )
        return Series(
            [self.times_s[i] for i in kept], [self.steps[i] for i in kept], [self.values[i] for i in kept]
        )

    def recent_mean(self, num_points: int) -> float:
        """The mean of the last `num_points` values, or of as many as there are. There must be at least
        one."""
        return float(np.mean(self.values[-num_points:]))


def collect(records: Iterable[Sample | Event]) -> dict[SeriesKey, Series]:
    """The numbers in the samples as series by rank and name, those that a chart shows."""
    series: dict[SeriesKey, Series] = {}
    for record in records:
        if not isinstance(record, Sample):
            continue
        for name, value in record.values.items():
            # Rank 0's learning rate is that of every rank.
            if name in _SERIES_OF_NO_CHART or (record.rank > 0 and is_learning_rate(name)):
                continue
            series.setdefault((record.rank, name), Series()).append(record.time_s, record.step, value)
    return series


class History:
    """All series and marks of one run."""

    def __init__(self) -> None:
        """Make an empty history, which `add` fills."""
        self.series: dict[SeriesKey, Series] = {}
        self.marks: list[Event] = []
        self.result: Event | None = None
        self.pictures: Event | None = None
        """The newest pictures of what the ranks search for."""
        self.profiles: dict[int, Event] = {}
        """The profile of each rank, with the parts of the time of its profiled steps."""
        self._marked: set[tuple[str, str, int]] = set()

    def add(self, records: Iterable[Sample | Event]) -> tuple[dict[SeriesKey, Series], list[Event]]:
        """Add new records; return the points and marks that are new."""
        records = list(records)
        new_series = collect(records)
        for key, new in new_series.items():
            self.series.setdefault(key, Series()).extend(new)
        new_marks = [r for r in records if isinstance(r, Event) and self._is_worth_a_mark(r)]
        self.marks.extend(new_marks)
        return new_series, new_marks

    def ranks_of(self, name: str) -> dict[int, Series]:
        """The series called `name`, by rank."""
        return {rank: series for (rank, n), series in sorted(self.series.items()) if n == name}

    def newest(self) -> dict[int, dict[str, float]]:
        """Return the newest value of each series, by rank and name."""
        by_rank: dict[int, dict[str, float]] = {}
        for (rank, name), series in sorted(self.series.items()):
            by_rank.setdefault(rank, {})[name] = series.values[-1]
        return by_rank

    def _is_worth_a_mark(self, event: Event) -> bool:
        """Return whether an event gets a mark in the charts. A result, pictures or a profile are kept as the
        newest of their kind in place of that."""
        # `Reader.damage` names all damaged lines in a sentence, and the others are for `Run.timeline`.
        if event.kind in (DAMAGE, TIMELINE, CLOCKS):
            return False
        if event.kind == "result":
            self.result = event
            return False
        if event.kind == "pictures":
            self.pictures = event
            return False
        if event.kind == "profile":
            self.profiles[event.rank] = event
            return False
        if event.kind == "state" and event.text not in _MARKED_STATES:
            return False
        # Every rank records a pause or a checkpoint, and one mark for all of them is enough.
        key = (event.kind, event.text, event.step)
        if key in self._marked:
            return False
        self._marked.add(key)
        return True
