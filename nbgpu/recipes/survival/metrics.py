"""Metrics of predicted hazards: concordance, discrimination at a time, and calibration of probabilities.

All of them compare patients with one another, so they need the scores of all ranks; no metric may be averaged
over ranks. NumPy in float64; `times` are the times to the event or to the end of the observation, `events` is
whether the event occurred, both (N,).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import trapezoid

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MAX_ROWS = 512
"""The most patients who are compared with all others at once."""


@dataclass(frozen=True)
class Steps:
    """A step function that is constant between the times, and equals `start` before the first time."""

    times: Floats
    values: Floats
    start: float

    def at(self, when: ArrayLike) -> Floats:
        """Return the function's values at the given times, after a step at the same time."""
        return self._value(np.searchsorted(self.times, when, side="right"))

    def before(self, when: ArrayLike) -> Floats:
        """Return the function's values just before the given times (its left limits)."""
        return self._value(np.searchsorted(self.times, when, side="left"))

    def _value(self, num_steps: NDArray[np.intp]) -> Floats:
        """Return the function's values after so many of its steps."""
        return np.concatenate(([self.start], self.values))[num_steps]


def kaplan_meier(times: Floats, events: Flags) -> Steps:
    """Estimate the probability of no event by each time (Kaplan & Meier 1958)."""
    when, num_events, num_at_risk = _counted(times, events)
    return Steps(when, np.asarray(np.cumprod(1 - num_events / num_at_risk), dtype=np.float64), 1.0)


def censoring(times: Floats, events: Flags) -> Steps:
    """Estimate the probability of still being observed at each time: the Kaplan-Meier estimate with censoring
    in place of the event.

    Where one patient has the event and another is censored at the same time, the event comes first, and the
    patient with the event is not in the risk set of the censoring.
    """
    when, num_events, num_at_risk = _counted(times, events)
    num_lost = -np.diff(num_at_risk, append=0) - num_events
    num_left = num_at_risk - num_events
    lost = np.divide(num_lost, num_left, out=np.zeros_like(num_left), where=num_left > 0)
    return Steps(when, np.cumprod(1 - lost), 1.0)


def baseline_hazard(scores: Floats, times: Floats, events: Flags) -> Steps:
    """Estimate the cumulative hazard of a patient with the score 0 (Breslow 1972). The cumulative hazard of
    another patient is exp(score) times as high."""
    when, num_events, _ = _counted(times, events)
    order = np.argsort(times)
    at_risk = np.cumsum(np.exp(scores[order])[::-1])[::-1]
    first = np.searchsorted(times[order], when)
    return Steps(when, np.cumsum(num_events / at_risk[first]), 0.0)


def survival(scores: Floats, baseline: Steps, when: Floats) -> Floats:
    """Return the probability of no event until each time, (N, T)."""
    return np.asarray(np.exp(-np.exp(scores)[:, None] * baseline.at(when)[None, :]))


def _counted(times: Floats, events: Flags) -> tuple[Floats, Floats, Floats]:
    """Return (the distinct times, the number of events at each, the number of patients at risk at each)."""
    when, index = np.unique(times, return_inverse=True)
    num_events = np.bincount(index, weights=events, minlength=len(when)).astype(np.float64)
    num_ended = np.bincount(index, minlength=len(when))
    return when, num_events, num_ended[::-1].cumsum()[::-1].astype(np.float64)


def c_index(scores: Floats, times: Floats, events: Flags) -> float:
    """Compute the concordance index: the share of the comparable pairs that the scores rank correctly, where
    equal scores count half (Harrell 1982).

    A pair is comparable if it is known which patient had the event first. At equal times, an event comes
    before a censored patient, and two events are not comparable. NaN if there is no comparable pair.
    """
    concordant = comparable = 0.0
    for part in _blocks(events):
        later = _later(times, events, part)
        concordant += _in_order(scores[part], scores)[later].sum()
        comparable += np.count_nonzero(later)
    return float(concordant / comparable) if comparable else float("nan")


def uno_c_index(
    scores: Floats, times: Floats, events: Flags, observed: Steps, end: float = float("inf")
) -> float:
    """Compute the concordance index of the pairs whose earlier time is at most `end`, each weighted with the
    inverse square of the probability of still being observed just before that time (Uno et al. 2011).

    Unlike Harrell's index, it does not depend on how many patients were censored. Late events, when few
    patients are still observed, have large weights, so that an earlier `end` lowers its variance. NaN if
    there is no such pair within the training follow-up.

    Args:
        scores: log hazards (N,).
        times, events: the outcomes of these patients, (N,).
        observed: the result of `censoring` for the training patients.
        end: the latest time of the earlier event of a pair.
    """
    concordant = comparable = 0.0
    weights = _inverse(observed.before(times)) ** 2
    for part in _blocks(events & is_known(times, observed) & (times <= end)):
        later = _later(times, events, part)
        concordant += weights[part] @ (_in_order(scores[part], scores) * later).sum(axis=1)
        comparable += weights[part] @ later.sum(axis=1)
    return float(concordant / comparable) if comparable else float("nan")


def c_index_interval(
    scores: Floats, times: Floats, events: Flags, seed: int, num_draws: int = 1000, share: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of Harrell's C-index over patients (Efron & Tibshirani 1993,
    chapter 13): (lower end, upper end), or NaN if no draw has a comparable pair.

    Args:
        scores: log hazards (N,).
        times, events: the outcomes of these patients, (N,).
        seed: the seed of the draws.
        num_draws: the number of bootstrap samples, each of N patients drawn with replacement.
        share: the share of the draws that the interval holds.
    """
    num = len(scores)
    # How often each draw contains each patient, (num_draws, N), so that the pairs of all draws are counted by
    # matrix products.
    draws = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), size=num_draws)
    drawn = draws.astype(np.float64)
    concordant, comparable = np.zeros(num_draws), np.zeros(num_draws)
    for part in _blocks(events):
        later = _later(times, events, part)
        # A patient who is drawn twice forms all pairs twice, and no pair with itself.
        concordant += (drawn[:, part] * (drawn @ (_in_order(scores[part], scores) * later).T)).sum(axis=1)
        comparable += (drawn[:, part] * (drawn @ later.T.astype(np.float64))).sum(axis=1)
    indices = concordant[comparable > 0] / comparable[comparable > 0]
    if not len(indices):
        return float("nan"), float("nan")
    low, high = np.quantile(indices, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _blocks(chosen: Flags) -> list[NDArray[np.intp]]:
    """Return the indices of the chosen patients in blocks, so that pairs with all N patients fit into memory:
    (M,) each, with M at most _MAX_ROWS."""
    rows = np.flatnonzero(chosen)
    return np.split(rows, range(_MAX_ROWS, len(rows), _MAX_ROWS))


def _later(times: Floats, events: Flags, part: NDArray[np.intp]) -> Flags:
    """Return for each of the patients `part` (M,), who have the event, which of all patients have it later or
    are observed for longer: (M, N)."""
    return np.asarray((times > times[part, None]) | ((times == times[part, None]) & ~events))


def is_known(when: ArrayLike, observed: Steps) -> Flags:
    """Return which times are within the training follow-up, before the last time of a training patient. AUC
    and Brier score are not defined later, because their weights are not."""
    return np.asarray((np.asarray(when) < observed.times[-1]) & (observed.at(when) > 0))


def _in_order(earlier: Floats, later: Floats) -> Floats:
    """Return 1 where the first patient has the higher score, and half where the scores are equal: (N,), (M,)
    -> (N, M)."""
    difference = earlier[:, None] - later
    return np.asarray((np.sign(difference) + 1) / 2)


def auc(scores: Floats, times: Floats, events: Flags, when: Floats, observed: Steps) -> Floats:
    """Compute how well scores separate patients with the event by each time from patients with a later time,
    (T,) (Uno et al. 2007).

    Cumulative/dynamic AUC: each event is weighted with the inverse of the probability of still being observed
    just before it. NaN if either group is empty, and beyond the training follow-up (`is_known`).

    Args:
        scores: log hazards (N,).
        times, events: the outcomes of these patients, (N,).
        when: the times, (T,).
        observed: the result of `censoring` for the training patients.
    """
    weights = _inverse(observed.before(times)) * events
    areas = np.full(len(when), np.nan)
    for index in np.flatnonzero(is_known(when, observed)):
        cases, controls = (times <= when[index]) & events, times > when[index]
        in_order = weights[cases] @ _in_order(scores[cases], scores[controls])
        if total := weights[cases].sum() * np.count_nonzero(controls):
            areas[index] = in_order.sum() / total
    return areas


def brier(probabilities: Floats, times: Floats, events: Flags, when: Floats, observed: Steps) -> Floats:
    """Compute the mean squared error of the probability of no event until each time, (T,) (Graf et al. 1999).
    NaN beyond the training follow-up (`is_known`).

    Args:
        probabilities: the probabilities of no event, (N, T).
        times, events: the outcomes of the patients, (N,).
        when: the times, (T,).
        observed: the result of `censoring` for the training patients.
    """
    has_had_event = (times[:, None] <= when) & events[:, None]
    later = times[:, None] > when
    at_event, at_time = _inverse(observed.before(times))[:, None], _inverse(observed.at(when))
    # A patient who was censored before a time has no term; the weights of the others make up for that.
    errors = has_had_event * probabilities**2 * at_event + later * (1 - probabilities) ** 2 * at_time
    return np.where(is_known(when, observed), errors.mean(axis=0), np.nan)


def integrated(values: Floats, when: Floats) -> float:
    """Return the mean of values (T,) over the times `when` (T,), by the trapezoidal rule. The mean of Brier
    scores is the integrated Brier score (IBS)."""
    return float(trapezoid(values, when) / (when[-1] - when[0]))


def _inverse(shares: Floats) -> Floats:
    """Return 1 / share, the weight of inverse probability of censoring, and 0 where the share is 0."""
    return np.divide(1.0, shares, out=np.zeros_like(shares), where=shares > 0)


def risk_groups(scores: Floats, thresholds: Floats) -> NDArray[np.intp]:
    """Return the risk group (N,) of each patient, from 0 for the lowest risk: the number of thresholds below
    the score. The thresholds are in ascending order."""
    return np.searchsorted(thresholds, scores)
