"""Bootstrap intervals, which show whether two methods, measured on the same held-out cases, differ by more
than chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEWEST_CASES = 8
"""With fewer held-out cases no verdict is given, because the ends of a bootstrap interval would depend on a
few single cases."""
_NUM_DRAWS = 1000
_SHARE = 0.95

Floats = NDArray[np.float64]


def too_few(num_cases: int, cases: str) -> str:
    """Return a sentence that takes the place of a verdict; empty if there are enough cases."""
    if num_cases >= FEWEST_CASES:
        return ""
    return f"No verdict: {num_cases} held-out {cases} are too few to judge by, which takes {FEWEST_CASES}"


def interval(statistic: Callable[[Floats], Floats], *values: ArrayLike) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a statistic over cases (Efron & Tibshirani
    1993, chapter 13).

    Args:
        statistic: a function of the means over the drawn cases, (K, num_draws) -> (num_draws,).
        values: K sequences with one number for each case, (N,); a case is drawn with all its numbers.
    """
    measured = np.array(values, dtype=np.float64)
    num_cases = measured.shape[1]
    # The seed is fixed, so that the same measurements always give the same interval.
    drawn = np.random.default_rng(0).integers(num_cases, size=(_NUM_DRAWS, num_cases))
    low, high = np.quantile(statistic(measured[:, drawn].mean(axis=2)), [(1 - _SHARE) / 2, (1 + _SHARE) / 2])
    return float(low), float(high)


def mean_interval(values: ArrayLike) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of values (N,), one for each case."""
    return interval(lambda means: means[0], values)


def ratio_interval(numerators: ArrayLike, denominators: ArrayLike) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio of two means over the same cases, each (N,)."""
    return interval(lambda means: np.asarray(means[0] / means[1].clip(1e-300)), numerators, denominators)
