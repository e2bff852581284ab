"""The history of a run for its panel: every series in bounded memory, and the events that the charts mark.

A run may last for days. Each series therefore keeps a few thousand points. When a series is full, half of its
points are dropped, but the lowest and the highest point of each stretch of steps and of time stay. So the
past has as many points as a chart has pixels, and no visible spike is lost.
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

_MIN_POINTS_OVER_TIME = 100
"""Series that are thinned to fewer points cover a short time, in which steps and seconds pass evenly."""

_NOT_CHARTED = frozenset({*STEP_PARTS, *EXCHANGE_PARTS, *STEP_MOMENTS}) - {"data_s"}

_MARKED_STATES = frozenset({"paused", "failed"})

SeriesKey = tuple[int, str]
"""(rank, series name)"""


def keep_extremes(x: NDArray[np.float64], values: NDArray[np.float64], num_columns: int) -> NDArray[np.intp]:
    """The indices of the points to keep so that a line chart with `num_columns` columns of pixels looks the
    same.

    The range of x is cut into equal columns. The lowest and the highest point of each column are kept, and
    the very first and last point. Columns with equal numbers of points would not do: points that are left
    from an earlier thinning would be thinned again each time, until a long run has lost its beginning.

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
    """One recorded number of one rank, by time and by optimizer step."""

    times_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def append(self, time_s: float, step: int, value: float) -> None:
        """Append a point, and thin a full series to half of its capacity. A run that goes back to a
        checkpoint repeats steps; the earlier points of these steps are dropped."""
        if self.steps and step < self.steps[-1]:
            kept = bisect_left(self.steps, step)
            del self.times_s[kept:], self.steps[kept:], self.values[kept:]
        self.times_s.append(time_s)
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) >= CAPACITY:
            half = self.thinned(CAPACITY // 2)
            self.times_s, self.steps, self.values = half.times_s, half.steps, half.values

    def extend(self, other: Series) -> None:
        """Append the points of another series."""
        for point in zip(other.times_s, other.steps, other.values, strict=True):
            self.append(*point)

    def thinned(self, max_points: int, over_time: bool = True) -> Series:
        """A copy with fewer points that looks the same in a chart with a quarter as many columns of pixels;
        this series itself if it is short enough.

        Args:
            max_points: the largest number of points in the copy, at least 4.
            over_time: whether the x axis may be time as well as steps. The two differ in a pause, which has
                no steps.
        """
        if len(self.values) <= max_points:
            return self
        axes: list[list[int] | list[float]] = [self.steps]
        if over_time and max_points >= _MIN_POINTS_OVER_TIME:
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
        """The mean of the last `num_points` values, or of all if there are fewer. The series must not be
        empty."""
        return float(np.mean(self.values[-num_points:]))


class History:
    """All series and marks of one run."""

    def __init__(self) -> None:
        """Make an empty history, which `add` fills."""
        self.series: dict[SeriesKey, Series] = {}
        self.marks: list[Event] = []
        self.result: Event | None = None
        self.pictures: Event | None = None
        """The newest pictures that a search has recorded."""
        self.profiles: dict[int, Event] = {}
        """The profile of each rank, with the parts of the time of its profiled steps."""
        self._marked: set[tuple[str, str, int]] = set()

    def add(self, records: Iterable[Sample | Event]) -> tuple[dict[SeriesKey, Series], list[Event]]:
        """Add new records; return the points and marks that are new."""
        new_series: dict[SeriesKey, Series] = {}
        new_marks: list[Event] = []
        for record in records:
            if isinstance(record, Event):
                if self._takes_mark(record):
                    new_marks.append(record)
                continue
            for name, value in record.values.items():
                # All ranks have the same learning rate, and rank 0's is enough.
                if name not in _NOT_CHARTED and not (record.rank > 0 and is_learning_rate(name)):
                    series = new_series.setdefault((record.rank, name), Series())
                    series.append(record.time_s, record.step, value)
        for key, new in new_series.items():
            self.series.setdefault(key, Series()).extend(new)
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

    def _takes_mark(self, event: Event) -> bool:
        """Return whether an event gets a mark in the charts. Keep a result, pictures or a profile, which get
        none, as the newest of their kind."""
        match event.kind:
            case "result":
                self.result = event
                return False
            case "pictures":
                self.pictures = event
                return False
            case "profile":
                self.profiles[event.rank] = event
                return False
            # `Reader.damage` names the damaged lines, and the other two are for `Run.timeline`.
            case kind if kind in (DAMAGE, TIMELINE, CLOCKS):
                return False
            case "state" if event.text not in _MARKED_STATES:
                return False
        # Every rank records a pause or a checkpoint, and one mark for all of them is enough.
        key = (event.kind, event.text, event.step)
        is_new = key not in self._marked
        self._marked.add(key)
        return is_new
