"""The format of points for the panel's page: four flat little-endian arrays, one buffer each.

buffer 0   uint16   the number of the series, in the order in which the series were announced
buffer 1   float64  time in seconds since the epoch
buffer 2   int32    optimizer steps done
buffer 3   float32  the value
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nbgpu.ui.run.history import Series, SeriesKey


class SeriesIds:
    """Numbers the series in the order in which they first appear."""

    def __init__(self) -> None:
        self._ids: dict[SeriesKey, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def number(self, key: SeriesKey) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def announce(self, first: int = 0) -> list[list[int | str]]:
        """[rank, name] of every series from number `first` on."""
        return [[rank, name] for rank, name in list(self._ids)[first:]]


def encode(series: Mapping[SeriesKey, Series], ids: SeriesIds, max_points: int) -> list[bytes]:
    """Return the four buffers with the points of all series, each thinned to at most `max_points`."""
    numbers: list[int] = []
    times_s: list[float] = []
    steps: list[int] = []
    values: list[float] = []
    for key, full in series.items():
        thin = full.thinned(max_points)
        numbers += [ids.number(key)] * len(thin.values)
        times_s += thin.times_s
        steps += thin.steps
        values += thin.values
    # A value that float32 cannot hold becomes infinite.
    with np.errstate(over="ignore"):
        return [
            np.asarray(numbers, dtype="<u2").tobytes(),
            np.asarray(times_s, dtype="<f8").tobytes(),
            np.asarray(steps, dtype="<i4").tobytes(),
            np.asarray(values, dtype="<f4").tobytes(),
        ]
