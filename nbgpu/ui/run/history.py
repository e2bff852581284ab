"""What a panel remembers of a run: every series in bounded memory, and the moments worth a mark.

A run may last for days. Each series therefore keeps a few thousand points: when it is full, the points are
thinned to half, and the lowest and the highest of each stretch of steps and of time stay, so that the past has as
many points as a chart has pixels, and no spike is ever lost to the eye.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nbgpu.protocol.records import DAMAGE, Event, Sample

CAPACITY = 8192
"""Points that a series holds before it is thinned to half."""

_MIN_POINTS_OVER_BOTH = 100
"""Fewer points are those of a moment, in which steps and seconds pass evenly."""

SERIES_ALIKE_ON_ALL_RANKS = frozenset({"lr"})
"""Series that are the same number on every rank by construction: rank 0's is enough."""

_MARKED_STATES = frozenset({"paused", "failed"})

SeriesKey = tuple[int, str]
"""(rank, series name)"""


def keep_extremes(x: NDArray[np.float64], values: NDArray[np.float64], num_columns: int) -> NDArray[np.intp]:
    """Which points a picture of so many columns needs, in order.

    x is cut into equal stretches, such as the columns of a chart's pixels, and the lowest and the highest point of each
    are kept, as well as the first and the last point of all. Equal numbers of points would not do: what was thinned
    before would be thinned more each time, until nothing is left of a long run's beginning.

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
    # NaN would win every comparison and hide the extremes around it.
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
        if self.steps and step < self.steps[-1]:
            self._forget_from(step)
        self.times_s.append(time_s)
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) >= CAPACITY:
            half = self.thinned(CAPACITY // 2)
            self.times_s, self.steps, self.values = half.times_s, half.steps, half.values

    def _forget_from(self, step: int) -> None:
        """Drops the points from a step on: a run that went back to a checkpoint does these steps again."""
        kept = bisect_left(self.steps, step)
        del self.times_s[kept:], self.steps[kept:], self.values[kept:]

    def extend(self, other: Series) -> None:
        for point in zip(other.times_s, other.steps, other.values, strict=True):
            self.append(*point)

    def thinned(self, max_points: int, over_time: bool = True) -> Series:
        """At most `max_points` of these points, at least 4, which look the same in a chart that is not too wide; this
        series itself where it has no more.

        Args:
            max_points: of the copy.
            over_time: whether the chart may go over time as well as over steps, of which a pause has none.
        """
        if len(self.values) <= max_points:
            return self
        axes: list[list[int] | list[float]] = [self.steps]
        if over_time and max_points >= _MIN_POINTS_OVER_BOTH:
            axes.append(self.times_s)
        values = np.asarray(self.values, dtype=np.float64)
        num_columns = (max_points // len(axes) - 2) // 2
        kept = np.unique(
            np.concatenate([keep_extremes(np.asarray(x, np.float64), values, num_columns) for x in axes])
        )
        return Series(
            [self.times_s[i] for i in kept], [self.steps[i] for i in kept], [self.values[i] for i in kept]
        )

    def recent_mean(self, num_points: int) -> float:
        """The mean of the last `num_points` values, or of as many as there are; at least one must be there."""
        return float(np.mean(self.values[-num_points:]))


def collect(records: Iterable[Sample | Event]) -> dict[SeriesKey, Series]:
    """The samples' numbers, sorted by rank and series name."""
    series: dict[SeriesKey, Series] = {}
    for record in records:
        if not isinstance(record, Sample):
            continue
        for name, value in record.values.items():
            if record.rank > 0 and name in SERIES_ALIKE_ON_ALL_RANKS:
                continue
            series.setdefault((record.rank, name), Series()).append(record.time_s, record.step, value)
    return series


class History:
    """All series and marks of one run."""

    def __init__(self) -> None:
        self.series: dict[SeriesKey, Series] = {}
        self.marks: list[Event] = []
        self.result: Event | None = None
        self.pictures: Event | None = None
        """What the ranks look for, as it was when they last showed it."""
        self.profiles: dict[int, Event] = {}
        """By rank: where the time of the profiled steps went."""
        self._marked: set[tuple[str, str, int]] = set()

    def add(self, records: Iterable[Sample | Event]) -> tuple[dict[SeriesKey, Series], list[Event]]:
        """Remembers new records; returns what was new in them, series and marks."""
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

    def _is_worth_a_mark(self, event: Event) -> bool:
        if event.kind == DAMAGE:  # `Reader.damage` names all of them in a sentence
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
        # Every rank tells of a pause or a checkpoint; one mark for all of them is enough.
        key = (event.kind, event.text, event.step)
        if key in self._marked:
            return False
        self._marked.add(key)
        return True
