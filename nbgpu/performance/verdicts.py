"""The verdicts of a study: which differences are decided, and what would decide the others.

A difference is decided where the intervals of two points do not overlap. One repeat has no interval: how much
repeats differ is not known. A speed-up above the number of ranks is no effect of more ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nbgpu.performance.study_results import Gap, PointSummary

LEAST_REPEATS = 2
"""Fewer have no interval."""
_MOST_REPEATS = 20
"""A difference that needs more repeats is too small to matter."""
ABOVE_RANKS = (
    "a speed-up above the number of ranks is not one of more ranks: something else took part of the machine while fewer "
    "ranks were measured, or their data did not fit into a cache. Measure again with repeats=5 and nothing else running"
)
ONE_REPEAT = "one repeat has no interval. Measure with repeats=3"


def doubt(point: PointSummary) -> str:
    """Return why the comparison of a point with the reference is not decided, and what would decide it; an
    empty text if it is decided, and for the reference itself."""
    if point.is_reference:
        return ""
    low, high = point.relative_between
    if point.is_beyond_ranks:
        return ABOVE_RANKS
    if point.num_repeats < LEAST_REPEATS:
        return ONE_REPEAT
    if not low <= 1 <= high:
        return ""
    needed = _repeats_needed(point.num_repeats, point.relative - 1, high - low)
    return f"its interval holds 1, which is no difference. {_more_repeats(needed)}"


def point_verdict(summary: Sequence[PointSummary | Gap], value: Any, by_ranks: bool) -> str:
    """Return the samples per second of a point relative to the reference, or why that is not decided.

    Args:
        summary: the points of a study.
        value: the value of the point.
        by_ranks: whether the study varies the number of ranks.

    Raises:
        KeyError: there is no such point, or it was not measured.
    """
    measured = next((p for p in summary if isinstance(p, PointSummary) and p.value == value), None)
    if measured is None:
        raise KeyError(value)
    low, high = measured.relative_between
    what = f"{'speed-up' if by_ranks else 'samples per second by the first point'} {measured.relative:.2f}"
    if measured.num_repeats >= LEAST_REPEATS and not measured.is_reference:
        what += f" ({low:.2f} to {high:.2f})"
    reason = doubt(measured)
    return f"not decided: {what}; {reason}" if reason else what


def fastest(summary: Sequence[PointSummary | Gap], vary: str) -> str:
    """Return which point is the fastest, or why that is not decided.

    Args:
        summary: the points of a study.
        vary: the name of the setting that the study varies.
    """
    measured = sorted(
        (point for point in summary if isinstance(point, PointSummary)),
        key=lambda point: -point.samples_per_s,
    )
    if len(measured) < 2:
        return "not decided: fewer than two points were measured"
    best = measured[0]
    named = f"{vary}={best.value} with {best.samples_per_s:.4g} samples/s"
    if min(point.num_repeats for point in measured) < LEAST_REPEATS:
        return f"not decided: {named}; {ONE_REPEAT}"
    alike = [point for point in measured[1:] if point.samples_between[1] >= best.samples_between[0]]
    if alike:
        others = " and ".join(str(point.value) for point in alike)
        needed = max(
            _repeats_needed(
                min(best.num_repeats, point.num_repeats),
                best.samples_per_s - point.samples_per_s,
                sum(high - low for low, high in (best.samples_between, point.samples_between)),
            )
            for point in alike
        )
        return f"not decided: {named}, whose interval overlaps that of {others}. {_more_repeats(needed)}"
    return named


def _repeats_needed(num_repeats: int, difference: float, width: float) -> float:
    """Return the number of repeats that would decide a difference: an interval shrinks with the square root
    of their number. Infinite for no difference.

    Args:
        num_repeats: the repeats so far.
        difference: the difference between the two points.
        width: the width of the difference's interval.
    """
    if not difference:
        return math.inf
    return max(math.ceil(num_repeats * (width / 2 / difference) ** 2) + 1, num_repeats + 2)


def _more_repeats(needed: float) -> str:
    if needed <= _MOST_REPEATS:
        return f"repeats={needed} would probably tell, with nothing else running"
    return f"Even {_MOST_REPEATS} repeats would not tell so small a difference"
