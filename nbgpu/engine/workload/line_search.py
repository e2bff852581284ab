"""A search along a line for a point that meets the strong Wolfe conditions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_DECREASE = 1e-3
"""The share of the decrease that the slope promises which a step has to reach; L-BFGS-B has the same."""
_CURVATURE = 0.9
"""The share of the slope that may be left after a step; L-BFGS-B has the same."""
_MAX_TRIALS = 20
_GROWTH = 4.0
_MARGIN = 0.1
"""How near to an end of an interval the next trial may be, as a share of the interval."""


@dataclass(frozen=True)
class Trial:
    """A point on the line."""

    step: float
    loss: float
    slope: float
    """The derivative of the loss by the step."""


def strong_wolfe(try_step: Callable[[float], Trial], start: Trial, longest: float) -> Trial | None:
    """Find a step that lowers the loss enough and leaves little of the slope: first the step 1, then longer
    ones until an interval holds such a step, then the minimiser of a cubic in that interval.

    After Nocedal and Wright, "Numerical Optimization" (2nd edition, algorithms 3.5 and 3.6).

    Args:
        try_step: evaluates the loss at a step above 0.
        start: step 0, with a negative slope.
        longest: the longest step allowed, at least 1. It is taken if the loss still falls there.

    Returns:
        The trial that was evaluated last, or None if there was none that will do.
    """
    low, high = start, None
    step = 1.0
    for _ in range(_MAX_TRIALS):
        trial = try_step(step)
        promised = start.loss + _DECREASE * step * start.slope
        if trial.loss > promised or (low is not start and trial.loss >= low.loss):
            high = trial
        elif abs(trial.slope) <= -_CURVATURE * start.slope:
            return trial
        elif trial.slope * (1.0 if high is None else high.step - low.step) >= 0:
            low, high = trial, low
        elif high is None and step >= longest:
            return trial
        else:
            low = trial
        step = min(_GROWTH * step, longest) if high is None else _cubic_minimiser(low, high)
    return None


def _cubic_minimiser(first: Trial, second: Trial) -> float:
    """Return the step at the minimum of the cubic that has the losses and slopes of both trials.

    It is the middle where the cubic has no minimum, and is kept away from both ends.
    """
    width = second.step - first.step
    slope = (second.loss - first.loss) / width
    rise = first.slope + second.slope - 3 * slope
    squared = rise * rise - first.slope * second.slope
    step = first.step + width / 2
    if squared >= 0:
        root = math.copysign(math.sqrt(squared), width)
        divisor = second.slope - first.slope + 2 * root
        if divisor:
            step = second.step - width * (second.slope + root - rise) / divisor
    margin = _MARGIN * abs(width)
    return min(max(step, min(first.step, second.step) + margin), max(first.step, second.step) - margin)
