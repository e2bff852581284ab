"""What a panel remembers of a run: every series in bounded memory, and the moments worth a mark.

A run may last for days. Each series therefore keeps a few thousand points: when it is full, the points are
thinned to half, and the lowest and the highest of each stretch stay, so that no spike is ever lost to the eye.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nbgpu.records import Event, Sample

CAPACITY = 4096
"""Points that a series holds before it is thinned to half."""

SERIES_ALIKE_ON_ALL_RANKS = frozenset({"lr"})
"""Series that are the same number on every rank by construction: rank 0's is enough."""

_MARKED_STATES = frozenset({"paused", "failed"})

SeriesKey = tuple[int, str]
"""(rank, series name)"""


def keep_extremes(values: NDArray[np.float64], max_points: int) -> NDArray[np.intp]:
    """Which points to keep, in order, so that at most `max_points` are left.

    The points are cut into equal stretches, and the lowest and the highest of each are kept, as well as the
    first and the last point of all.

    Args:
        values: shape (N,).
        max_points: at least 4.

    Returns:
        indices into `values`, ascending, shape (M,) with M <= max_points.
    """
    num_values = len(values)
    if num_values <= max_points:
        return np.arange(num_values)
    edges = np.linspace(0, num_values, (max_points - 2) // 2 + 1).astype(np.intp)
    # NaN would win every comparison and hide the extremes around it.
    low_side = np.where(np.isnan(values), np.inf, values)
    high_side = np.where(np.isnan(values), -np.inf, values)
    kept = [0, num_values - 1]
    for start, end in pairwise(edges):
        kept += [int(start + low_side[start:end].argmin()), int(start + high_side[start:end].argmax())]
    return np.unique(np.array(kept))


@dataclass
class Series:
    """One number of one rank over time."""

    times_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def append(self, time_s: float, step: int, value: float) -> None:
        self.times_s.append(time_s)
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) >= CAPACITY:
            half = self.thinned(CAPACITY // 2)
            self.times_s, self.steps, self.values = half.times_s, half.steps, half.values

    def extend(self, other: Series) -> None:
        for point in zip(other.times_s, other.steps, other.values, strict=True):
            self.append(*point)

    def thinned(self, max_points: int) -> Series:
        """A copy with at most `max_points` points and the same extremes."""
        kept = keep_extremes(np.asarray(self.values, dtype=np.float64), max_points)
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
