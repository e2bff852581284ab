"""Measures of survival predictions against closed cases and other libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbgpu.recipes.survival import metrics
from nbgpu.recipes.survival.metrics import Flags, Floats

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:lifelines", "ignore:Starting with pandas version 4"
)


def _cohort(num_patients: int = 300, ties: bool = True) -> tuple[Floats, Floats, Flags]:
    """(scores, times, events)."""
    rng = np.random.default_rng(5)
    scores = rng.normal(size=num_patients).round(1 if ties else 12)
    times = rng.exponential(np.exp(-scores)) * 10
    ends = rng.exponential(12, size=num_patients)
    events = times <= ends
    observed = np.minimum(times, ends)
    return scores, np.ceil(observed) if ties else observed, events


def test_kaplan_meier_by_hand() -> None:
    times, events = np.array([3.0, 1, 2, 2, 5]), np.array([True, True, True, False, False])
    found = metrics.kaplan_meier(times, events)
    # One of five at 1, one of four at 2, one of two at 3.
    np.testing.assert_allclose(found.at([0.5, 1, 2, 3, 9]), [1, 0.8, 0.6, 0.3, 0.3], rtol=1e-15)
    np.testing.assert_allclose(found.before([1, 2, 3]), [1, 0.8, 0.6], rtol=1e-15)
    # The end of an observation at 2 is after the event at 2: one of three.
    np.testing.assert_allclose(metrics.censoring(times, events).at([1, 2, 3, 5]), [1, 2 / 3, 2 / 3, 0])


def test_which_pairs_count_for_concordance() -> None:
    def found(scores: list[float], times: list[float], events: list[int]) -> float:
        return metrics.c_index(np.array(scores), np.array(times), np.array(events, dtype=bool))

    assert found([3, 2, 1], [1, 2, 3], [1, 1, 1]) == 1
    assert found([1, 2, 3], [1, 2, 3], [1, 1, 1]) == 0
    assert found([1, 1], [1, 2], [1, 0]) == 0.5
    # Nobody knows whether the second had the event before the first, if it ended sooner.
    assert math.isnan(found([1, 2], [2, 1], [1, 0]))
    assert found([2, 1], [1, 1], [1, 0]) == 1
    assert math.isnan(found([2, 1], [1, 1], [1, 1]))


def test_with_nothing_censored_the_weights_are_one() -> None:
    scores, times, _ = _cohort(200, ties=False)
    events = np.ones(200, dtype=bool)
    observed = metrics.censoring(times, events)
    when = np.quantile(times, [0.3, 0.6])
    above = scores[:, None] > scores
    for time, found in zip(when, metrics.auc(scores, times, events, when, observed), strict=True):
        pairs = (times[:, None] <= time) & (times > time)
        assert found == pytest.approx(above[pairs].mean(), abs=1e-14)
    guess = np.full((200, 2), 0.25)
    expected = [np.mean(((times > time) - 0.25) ** 2) for time in when]
    np.testing.assert_allclose(metrics.brier(guess, times, events, when, observed), expected, rtol=1e-13)
    assert metrics.integrated(np.array([1.0, 3.0]), when) == pytest.approx(2)


def test_baseline_and_survival_by_hand() -> None:
    scores, times, events = np.log([2.0, 1.0, 3.0]), np.array([1.0, 2, 2]), np.array([True, True, False])
    baseline = metrics.baseline_hazard(scores, times, events)
    np.testing.assert_allclose(baseline.at([0, 1, 2]), [0, 1 / 6, 1 / 6 + 1 / 4], rtol=1e-15)
    found = metrics.survival(scores, baseline, np.array([1.0]))
    np.testing.assert_allclose(found[:, 0], np.exp([-2 / 6, -1 / 6, -3 / 6]), rtol=1e-15)


def test_groups_are_split_at_the_thresholds() -> None:
    groups = metrics.risk_groups(np.array([-1.0, 0.5, 9.0, 0.0]), np.array([0.0, 1.0]))
    assert groups.tolist() == [0, 1, 2, 0]


def test_true_hazards_are_worth_what_they_should_be() -> None:
    scores, times, events = _cohort(4000, ties=False)
    observed = metrics.censoring(times, events)
    when = np.quantile(times[events], [0.2, 0.4, 0.6])
    known, nothing = (
        metrics.survival(s, metrics.baseline_hazard(s, times, events), when)
        for s in (scores, np.zeros_like(scores))
    )
    better = metrics.brier(known, times, events, when, observed)
    assert (better < metrics.brier(nothing, times, events, when, observed)).all()
    # The log hazards are normal, and those of the first events exp(score) times as frequent, which is normal
    # around 1.
    early = np.quantile(times[events], [0.1])
    expected = 0.5 + 0.5 * math.erf(0.5)
    assert metrics.auc(scores, times, events, early, observed)[0] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("ties", [False, True])
def test_lifelines_gives_the_same(ties: bool) -> None:
    lifelines = pytest.importorskip("lifelines")
    scores, times, events = _cohort(ties=ties)
    theirs = lifelines.utils.concordance_index(times, -scores, events)
    assert metrics.c_index(scores, times, events) == pytest.approx(theirs, abs=1e-14)
    curve = lifelines.KaplanMeierFitter().fit(times, events).survival_function_.iloc[:, 0]
    found = metrics.kaplan_meier(times, events)
    np.testing.assert_allclose(found.at(curve.index.to_numpy()), curve.to_numpy(), atol=1e-14)


def test_torchsurv_gives_the_same() -> None:
    """In single precision, and with the weights at the events themselves."""
    torch = pytest.importorskip("torch")
    measures = pytest.importorskip("torchsurv.metrics")
    weights_of = pytest.importorskip("torchsurv.stats.ipcw").get_ipcw
    scores, times, events = _cohort(ties=False)
    when = np.quantile(times[events], [0.25, 0.5, 0.75])
    observed = metrics.censoring(times, events)
    s, t, e, w = (torch.as_tensor(a) for a in (scores.astype(np.float32), times, events, when))
    t, w = t.float(), w.float()
    weight, weight_when = weights_of(e, t), weights_of(e, t, new_time=w)
    area = measures.auc.Auc()(s, e, t, new_time=w, weight=weight, weight_new_time=weight_when)
    found = metrics.auc(scores, times, events, when, observed)
    np.testing.assert_allclose(found, area.numpy(), atol=1e-5)
    guess = metrics.survival(scores, metrics.baseline_hazard(scores, times, events), when)
    score = measures.brier_score.BrierScore()(
        torch.as_tensor(guess).float(), e, t, new_time=w, weight=weight, weight_new_time=weight_when
    )
    np.testing.assert_allclose(metrics.brier(guess, times, events, when, observed), score.numpy(), atol=1e-5)
