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


# Training patients: one of four is lost at 2, and one of two at 4, so that G is 1, 3/4 from 2 on, and 3/8
# from 4 on; nobody is seen after 5. The test patients are others, one of them with the time of a loss.
_OBSERVED = metrics.censoring(np.array([1.0, 2, 3, 4, 5]), np.array([True, False, True, False, True]))
_TIMES = np.array([1.5, 2, 3.5, 6, 4.2])
_EVENTS = np.array([True, True, False, True, True])
_SCORES = np.array([2.0, 1, 1, 0, -1])


def test_measures_by_hand_with_weights_of_other_patients() -> None:
    np.testing.assert_allclose(_OBSERVED.at([1, 2, 3, 4]), [1, 3 / 4, 3 / 4, 3 / 8])
    guess = np.array([0.2, 0.5, 0.7, 0.9, 0.6])[:, None]
    # Two events, with G = 1 just before them: the squares of .2 and .5. Three are without at 3: the squares
    # of .3, .1 and .4, over G = 3/4.
    expected = (0.04 + 0.25 + (0.09 + 0.01 + 0.16) / 0.75) / 5
    found = metrics.brier(guess, _TIMES, _EVENTS, np.array([3.0]), _OBSERVED)
    np.testing.assert_allclose(found, [expected], rtol=1e-14)
    # At 4.5 the cases weigh 1, 1 and 8/3; the one control, with score 0, is below the first two.
    area = metrics.auc(_SCORES, _TIMES, _EVENTS, np.array([4.5]), _OBSERVED)
    np.testing.assert_allclose(area, [2 / (2 + 8 / 3)], rtol=1e-14)
    # Of the first patient 4 of 4 pairs are in order, of the second 2.5 of 3, of the last 0 of 1. Their
    # weights by Uno are 1, 1, and the square of 8/3.
    assert metrics.c_index(_SCORES, _TIMES, _EVENTS) == pytest.approx(6.5 / 8)
    found_uno = metrics.uno_c_index(_SCORES, _TIMES, _EVENTS, _OBSERVED)
    assert found_uno == pytest.approx(6.5 / (7 + 64 / 9), rel=1e-14)
    # Without the last one.
    assert metrics.uno_c_index(_SCORES, _TIMES, _EVENTS, _OBSERVED, end=4) == pytest.approx(6.5 / 7)


def test_beyond_the_training_follow_up_nothing_is_known() -> None:
    when = np.array([4.9, 5.0, 5.5])
    assert metrics.is_known(when, _OBSERVED).tolist() == [True, False, False]
    guess = np.full((5, 3), 0.5)
    for found in (
        metrics.brier(guess, _TIMES, _EVENTS, when, _OBSERVED),
        metrics.auc(_SCORES, _TIMES, _EVENTS, when, _OBSERVED),
    ):
        assert np.isnan(found).tolist() == [False, True, True]
    assert math.isnan(metrics.integrated(metrics.brier(guess, _TIMES, _EVENTS, when, _OBSERVED), when))
    # Where the last one was lost, nobody is left of whom it would be known.
    lost = metrics.censoring(np.array([1.0, 2, 3]), np.array([True, True, False]))
    assert metrics.is_known([2.5, 3.0, 4.0], lost).tolist() == [True, False, False]


def test_with_nothing_censored_unos_index_is_harrells() -> None:
    scores, times, _ = _cohort(200)
    events = np.ones(200, dtype=bool)
    observed = metrics.censoring(times, events)
    assert metrics.uno_c_index(scores, times, events, observed) == pytest.approx(
        metrics.c_index(scores, times, events), abs=1e-14
    )


def test_unos_index_does_not_drift_with_censoring() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=4000)
    times = rng.exponential(np.exp(-scores))
    ends = rng.uniform(0, 1.5, size=4000)
    seen, events = np.minimum(times, ends), times <= ends
    # The pairs whose earlier time is below 1, if everything had been observed.
    rows = times < 1
    above = (np.sign(scores[rows, None] - scores) + 1) / 2
    later = times > times[rows, None]
    whole = float(above[later].mean())
    weights_of = metrics.censoring(seen, events)
    cut = events & (seen < 1)
    uno = metrics.uno_c_index(scores, seen, cut, weights_of)
    assert uno == pytest.approx(whole, abs=0.01)


def test_the_interval_is_that_of_draws_one_by_one() -> None:
    scores, times, events = _cohort(60)
    low, high = metrics.c_index_interval(scores, times, events, seed=3, num_draws=200)
    drawn = np.random.default_rng(3).multinomial(60, np.full(60, 1 / 60), size=200)
    one_by_one = []
    for counts in drawn:
        chosen = np.repeat(np.arange(60), counts)
        one_by_one.append(metrics.c_index(scores[chosen], times[chosen], events[chosen]))
    assert (low, high) == pytest.approx(np.quantile(one_by_one, [0.025, 0.975]), abs=1e-12)
    assert low < metrics.c_index(scores, times, events) < high
    assert metrics.c_index_interval(scores, times, events, seed=3, num_draws=200) == (low, high)
    # Of many patients it is narrower.
    of_many = metrics.c_index_interval(*_cohort(1200), seed=3)
    assert of_many[1] - of_many[0] < (high - low) / 2
    nobody = metrics.c_index_interval(scores, times, np.zeros(60, dtype=bool), seed=3)
    assert all(math.isnan(end) for end in nobody)


def test_scikit_survival_gives_the_same() -> None:
    measures = pytest.importorskip("sksurv.metrics")
    structured = pytest.importorskip("sksurv.util").Surv.from_arrays
    scores, times, events = _cohort(ties=False)
    other_scores, other_times, other_events = (part[::-1][:150] for part in _cohort(400, ties=False))
    training, test = structured(events, times), structured(other_events, other_times)
    inside = other_times < times.max()
    observed = metrics.censoring(times, events)
    when = np.quantile(times[events], [0.25, 0.5, 0.75])
    own = other_scores[inside], other_times[inside], other_events[inside]
    areas, _ = measures.cumulative_dynamic_auc(training, test[inside], own[0], when)
    np.testing.assert_allclose(metrics.auc(*own, when, observed), areas, atol=1e-10)
    guess = metrics.survival(own[0], metrics.baseline_hazard(scores, times, events), when)
    _, theirs = measures.brier_score(training, test[inside], guess, when)
    np.testing.assert_allclose(metrics.brier(guess, *own[1:], when, observed), theirs, atol=1e-10)
    concordance = measures.concordance_index_ipcw(training, test[inside], own[0])[0]
    assert metrics.uno_c_index(*own, observed) == pytest.approx(concordance, abs=1e-10)
