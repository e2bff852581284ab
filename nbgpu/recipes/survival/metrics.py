"""What predicted hazards are worth: concordance, discrimination at a time, and calibrated probabilities.

All of them compare patients with one another, so that they need the scores of all ranks: none may be averaged
over ranks. NumPy in float64; `times` to the event or to the end of the observation, `events` whether it was
the event, both (N,).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import trapezoid

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_ROWS = 512
"""Pairs are compared in blocks of so many rows, so that large cohorts fit into memory."""


@dataclass(frozen=True)
class Steps:
    """A function that keeps its value from one time to the next: `start` before the first."""

    times: Floats
    values: Floats
    start: float

    def at(self, when: ArrayLike) -> Floats:
        """Its values, with the step that is made at that very time."""
        return self._value(np.searchsorted(self.times, when, side="right"))

    def before(self, when: ArrayLike) -> Floats:
        """Its values just before."""
        return self._value(np.searchsorted(self.times, when, side="left"))

    def _value(self, num_steps: NDArray[np.intp]) -> Floats:
        return np.concatenate(([self.start], self.values))[num_steps]


def kaplan_meier(times: Floats, events: Flags) -> Steps:
    """The share that has had no event, by time (Kaplan & Meier 1958)."""
    when, num_events, num_at_risk = _counted(times, events)
    return Steps(when, np.asarray(np.cumprod(1 - num_events / num_at_risk), dtype=np.float64), 1.0)


def censoring(times: Floats, events: Flags) -> Steps:
    """The share that would still be observed, by time: Kaplan and Meier's estimate for the ends of the
    observation.

    Who has the event at the same time has it first, and is not at risk of being lost then.
    """
    when, num_events, num_at_risk = _counted(times, events)
    num_lost = -np.diff(num_at_risk, append=0) - num_events
    num_left = num_at_risk - num_events
    lost = np.divide(num_lost, num_left, out=np.zeros_like(num_left), where=num_left > 0)
    return Steps(when, np.cumprod(1 - lost), 1.0)


def baseline_hazard(scores: Floats, times: Floats, events: Flags) -> Steps:
    """The cumulative hazard of a patient with the score 0 (Breslow 1972); that of another is exp(score) times
    as high."""
    when, num_events, _ = _counted(times, events)
    order = np.argsort(times)
    at_risk = np.cumsum(np.exp(scores[order])[::-1])[::-1]
    first = np.searchsorted(times[order], when)
    return Steps(when, np.cumsum(num_events / at_risk[first]), 0.0)


def survival(scores: Floats, baseline: Steps, when: Floats) -> Floats:
    """The probability of no event until each time, (N, T)."""
    return np.asarray(np.exp(-np.exp(scores)[:, None] * baseline.at(when)[None, :]))


def _counted(times: Floats, events: Flags) -> tuple[Floats, Floats, Floats]:
    """(the different times, events at each, patients who were observed until then)."""
    when, index = np.unique(times, return_inverse=True)
    num_events = np.bincount(index, weights=events, minlength=len(when)).astype(np.float64)
    num_ended = np.bincount(index, minlength=len(when))
    return when, num_events, num_ended[::-1].cumsum()[::-1].astype(np.float64)


def c_index(scores: Floats, times: Floats, events: Flags) -> float:
    """The share of the pairs that are ranked as they turned out, equal scores counted half (Harrell 1982).

    A pair counts where it is known who had the event first. At the same time, an event comes before a patient
    who is no longer observed, and of two events neither was first. NaN where there is no such pair.
    """
    concordant = comparable = 0.0
    rows = np.flatnonzero(events)
    for part in np.split(rows, range(_ROWS, len(rows), _ROWS)):
        later = (times > times[part, None]) | ((times == times[part, None]) & ~events)
        concordant += _in_order(scores[part], scores)[later].sum()
        comparable += np.count_nonzero(later)
    return float(concordant / comparable) if comparable else float("nan")


def _in_order(earlier: Floats, later: Floats) -> Floats:
    """1 where the first has the higher score, half where they are equal: (N,), (M,) -> (N, M)."""
    difference = earlier[:, None] - later
    return np.asarray((np.sign(difference) + 1) / 2)


def auc(scores: Floats, times: Floats, events: Flags, when: Floats, observed: Steps) -> Floats:
    """How well scores tell who has the event up to each time from who has it later, (T,) (Uno et al. 2007).

    Cumulative and dynamic, each event weighted with the inverse of the share that is still observed just
    before it. NaN where there is nobody on one of the sides.

    Args:
        scores: log hazards (N,).
        times, events: of the same patients.
        when: (T,).
        observed: what `censoring` gives, of the patients that were trained on.
    """
    weights = _inverse(observed.before(times)) * events
    found = []
    for time in when:
        cases, controls = (times <= time) & events, times > time
        in_order = weights[cases] @ _in_order(scores[cases], scores[controls])
        total = weights[cases].sum() * np.count_nonzero(controls)
        found.append(in_order.sum() / total if total else np.nan)
    return np.array(found)


def brier(probabilities: Floats, times: Floats, events: Flags, when: Floats, observed: Steps) -> Floats:
    """The mean squared error of the probability of no event until each time, (T,) (Graf et al. 1999).

    Args:
        probabilities: (N, T), of no event.
        times, events: (N,).
        when: (T,).
        observed: what `censoring` gives, of the patients that were trained on.
    """
    had_it = (times[:, None] <= when) & events[:, None]
    later = times[:, None] > when
    at_event, at_time = _inverse(observed.before(times))[:, None], _inverse(observed.at(when))
    errors = had_it * probabilities**2 * at_event + later * (1 - probabilities) ** 2 * at_time
    return np.asarray(errors.mean(axis=0))


def integrated(values: Floats, when: Floats) -> float:
    """The mean over time, by the trapezoidal rule: of Brier scores, the IBS."""
    return float(trapezoid(values, when) / (when[-1] - when[0]))


def _inverse(shares: Floats) -> Floats:
    return np.divide(1.0, shares, out=np.zeros_like(shares), where=shares > 0)


def risk_groups(scores: Floats, thresholds: Floats) -> NDArray[np.intp]:
    """The number of each patient's group (N,), the lowest risk first: how many of the rising thresholds are
    below."""
    return np.searchsorted(thresholds, scores)
