"""Laws of scaling, fitted to measured times: Amdahl's, Gustafson's, and the metric of Karp and Flatt.

Times are given by number of ranks, with a value for each repeat. Strong scaling means that all ranks together
do the same work for every number of ranks, weak scaling that each rank does. Intervals hold 95 % of what
resampled repeats give (the percentile bootstrap of Efron 1979, doi:10.1214/aos/1176344552). With three
repeats they are rough.

Amdahl 1967, doi:10.1145/1465482.1465560. Gustafson 1988, doi:10.1145/42411.42415. Karp and Flatt 1990,
doi:10.1145/78607.78614.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

_NUM_RESAMPLES = 1000
_SEED = 0
_QUANTILES = 40
"""Between the first and the last cut of 40 equal parts lie 95 % of the values."""

Interval = tuple[float, float]
"""The two ends between which 95 % of resampled values lie."""

Seconds = Mapping[int, Sequence[float]]
"""By number of ranks, the time of the work in each repeat. A number of ranks without times is left out."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    between: Interval

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.between[0]:.3g} to {self.between[1]:.3g})"


@dataclass(frozen=True)
class Law:
    """A law with a serial fraction that was fitted to measured times."""

    name: str
    serial_fraction: Estimate
    largest_ranks: int
    """The largest number of ranks that was measured. Beyond it the law is a guess."""
    _function: Callable[[int, float], float]
    """Computes the speed-up from the number of ranks and the serial fraction."""

    def speedup(self, ranks: int) -> Estimate:
        """Return the speed-up by the law, with the interval that follows from that of the serial fraction."""
        low, high = self.serial_fraction.between
        # More serial work means less speed-up.
        between = self._function(ranks, high), self._function(ranks, low)
        return Estimate(self._function(ranks, self.serial_fraction.value), between)


def amdahl(ranks: int, serial_fraction: float) -> float:
    """Return Amdahl's speed-up of a fixed amount of work with a serial fraction."""
    return 1 / (serial_fraction + (1 - serial_fraction) / ranks)


def gustafson(ranks: int, serial_fraction: float) -> float:
    """Return Gustafson's speed-up of work that grows with the number of ranks. The serial fraction is that of
    the time on `ranks` ranks."""
    return ranks - serial_fraction * (ranks - 1)


def karp_flatt(ranks: int, speedup: float) -> float:
    """Return the experimentally determined serial fraction for 2 ranks or more.

    If the fraction grows with the number of ranks, the speed-up is limited by an overhead of each rank, such
    as communication, and not by serial work. It is negative if the speed-up exceeds the number of ranks.
    """
    return (1 / speedup - 1 / ranks) / (1 - 1 / ranks)


def speedups(seconds: Seconds, is_weak: bool = False) -> dict[int, Estimate]:
    """Return the speed-up over one rank by number of ranks; for weak scaling, of work that grows with them.

    Raises:
        ValueError: the time of one rank is missing, or a time is not above 0.
    """
    return _estimated(seconds, lambda medians: _speedups(medians, is_weak))


def serial_fractions(seconds: Seconds) -> dict[int, Estimate]:
    """Return Karp and Flatt's serial fraction of strong scaling for each number of ranks above one.

    Raises:
        ValueError: the time of one rank or of more ranks is missing, or a time is not above 0.
    """
    _require_several(seconds)

    def fractions(medians: Mapping[int, float]) -> dict[int, float]:
        return {n: karp_flatt(n, s) for n, s in _speedups(medians).items() if n > 1}

    return _estimated(seconds, fractions)


def fit_amdahl(seconds: Seconds) -> Law:
    """Fit Amdahl's law to strong scaling, by least squares of the times relative to one rank's.

    Raises:
        ValueError: the time of one rank or of more ranks is missing, or a time is not above 0.
    """

    def fraction(medians: Mapping[int, float]) -> float:
        # T(n) / T(1) - 1/n = fraction x (1 - 1/n)
        return _slope((1 - 1 / n, s / medians[1] - 1 / n) for n, s in medians.items())

    return _fitted("Amdahl", seconds, fraction, amdahl)


def fit_gustafson(seconds: Seconds) -> Law:
    """Fit Gustafson's law to weak scaling, by least squares of the speed-ups.

    Raises:
        ValueError: the time of one rank or of more ranks is missing, or a time is not above 0.
    """

    def fraction(medians: Mapping[int, float]) -> float:
        # n - speed-up = fraction x (n - 1)
        return _slope((n - 1, n - s) for n, s in _speedups(medians, is_weak=True).items())

    return _fitted("Gustafson", seconds, fraction, gustafson)


def _fitted(
    name: str,
    seconds: Seconds,
    fraction: Callable[[Mapping[int, float]], float],
    law: Callable[[int, float], float],
) -> Law:
    """Fit a law's serial fraction to measured times, with its bootstrap interval.

    Args:
        name: the name of the law.
        seconds: times by number of ranks, of one rank and of more.
        fraction: computes the serial fraction from the median times.
        law: computes a speed-up from ranks and serial fraction.
    """
    _require_several(seconds)
    estimate = _estimated(seconds, lambda medians: {0: fraction(medians)})[0]
    return Law(name, estimate, max(n for n, times in seconds.items() if times), law)


def _slope(points: Iterator[tuple[float, float]]) -> float:
    """Return the least-squares slope of a line through the origin, clamped to 0..1."""
    pairs = list(points)
    return min(1.0, max(0.0, sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)))


def _speedups(medians: Mapping[int, float], is_weak: bool = False) -> dict[int, float]:
    return {n: medians[1] / s * (n if is_weak else 1) for n, s in medians.items()}


def _require_several(seconds: Seconds) -> None:
    if not any(times for n, times in seconds.items() if n > 1):
        raise ValueError("a law needs the times of two numbers of ranks, of which one is 1")


def _estimated(
    seconds: Seconds, compute: Callable[[Mapping[int, float]], dict[int, float]]
) -> dict[int, Estimate]:
    """Compute values from the median time of each number of ranks, with intervals from resampled repeats.

    Args:
        seconds: times by number of ranks.
        compute: returns values by any key from the medians.

    Raises:
        ValueError: the time of one rank is missing, or a time is not above 0.
    """
    measured = {n: list(times) for n, times in sorted(seconds.items()) if times}
    if 1 not in measured:
        raise ValueError("the time of one rank is missing, with which all others are compared")
    if wrong := [n for n, times in measured.items() if not all(0 < s < float("inf") for s in times)]:
        raise ValueError(f"times of {wrong} ranks are not numbers above 0")
    values = compute({n: median(times) for n, times in measured.items()})
    draw = random.Random(_SEED)
    resampled = [
        compute({n: median(draw.choices(times, k=len(times))) for n, times in measured.items()})
        for _ in range(_NUM_RESAMPLES)
    ]
    return {
        key: Estimate(value, interval([resample[key] for resample in resampled]))
        for key, value in values.items()
    }


def interval(values: Sequence[float]) -> Interval:
    """Return the ends between which 95 % of resampled values lie."""
    cuts = quantiles(values, n=_QUANTILES, method="inclusive")
    return cuts[0], cuts[-1]
