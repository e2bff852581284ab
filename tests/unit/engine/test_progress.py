"""Which validation was the best, and when it is time to stop."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from nbgpu.engine.training.progress import BestMetricTracker
from nbgpu.errors import RunError
from nbgpu.recipes.autoencoder.config import AutoencoderConfig


def progress(**settings: Any) -> BestMetricTracker:
    return BestMetricTracker(AutoencoderConfig.checked(**{"best_metric": "loss", **settings}))


def follow(following: BestMetricTracker, *values: float) -> list[tuple[int | None, bool]]:
    """(step of the best, whether it is time to stop) after each validation; they are at the steps 1, 2, 3
    ..."""
    told = []
    for step, value in enumerate(values, start=1):
        following.validated(step, {"loss": value, "psnr_db": -value})
        told.append((following.best.step if following.best else None, following.is_over))
    return told


def test_the_smallest_or_the_largest_is_the_best() -> None:
    assert [step for step, _ in follow(progress(), 3, 2, 2, 1, 5)] == [1, 2, 2, 4, 4]
    assert [step for step, _ in follow(progress(best_mode="max"), 3, 4, 4, 1)] == [1, 2, 2, 2]
    assert [step for step, _ in follow(progress(best_metric="psnr_db", best_mode="max"), 3, 2, 4)] == [
        1,
        2,
        2,
    ]


def test_patience_counts_validations_in_a_row_that_are_not_better() -> None:
    over = [over for _, over in follow(progress(early_stop_patience=2), 3, 4, 2, 2, 3)]
    assert over == [False, False, False, False, True]
    assert not any(over for _, over in follow(progress(), *[1.0] * 50))


def test_small_gains_are_the_best_and_do_not_keep_a_run_alive() -> None:
    following = progress(early_stop_patience=3, early_stop_min_delta=0.5)
    assert follow(following, 3.0, 2.9, 2.7, 2.6) == [(1, False), (2, False), (3, False), (4, True)]
    told = following.end_in_words(step=4)
    assert told == (
        "early stopping at step 4: loss was not better by more than 0.5 in the last 3 validations. "
        "The best is 2.6, of step 4: run.checkpoint('best')"
    )
    # Together they count.
    together = follow(progress(early_stop_patience=3, early_stop_min_delta=0.5), 3.0, 2.8, 2.6, 2.4)
    assert together[-1] == (4, False)


def test_what_is_no_number_is_never_better() -> None:
    following = progress(early_stop_patience=2)
    assert follow(following, math.nan, 3, -math.inf, math.nan) == [
        (None, False),
        (2, False),
        (2, False),
        (2, True),
    ]
    never = progress(early_stop_patience=2)
    assert follow(never, math.nan, math.nan)[-1] == (None, True)
    assert "NaN or infinite in all 2 validations" in never.end_in_words(2)


def test_it_goes_on_from_its_state_and_begins_anew_for_another_value() -> None:
    before = progress(early_stop_patience=2)
    follow(before, 3, 2, 4)
    state = json.loads(json.dumps(before.state()))
    after = progress(early_stop_patience=2)
    after.load_state(state)
    assert after.best == before.best
    after.validated(4, {"loss": 5.0})
    assert after.is_over
    other = progress(best_mode="max")
    other.load_state(state)
    assert other.best is None
    other.load_state(None)
    assert other.state() == progress(best_mode="max").state()


def test_a_value_that_the_validation_does_not_give_is_named_with_those_that_it_does() -> None:
    with pytest.raises(RunError, match=r"best_metric='loss' is not a value .* Values: dice"):
        progress().validated(1, {"dice": 0.5})
    with pytest.raises(RunError, match="no sample is held out"):
        progress().validated(1, {})
