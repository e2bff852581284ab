"""A verdict needs cases, and a difference beyond chance."""

from __future__ import annotations

import numpy as np
import pytest

from nbgpu.recipes import verdict


def test_the_interval_of_a_mean_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = [
        low <= 1.0 <= high
        for low, high in (verdict.mean_interval(generator.normal(1.0, 2.0, 40)) for _ in range(300))
    ]
    assert 0.9 <= np.mean(covered) <= 0.97


def test_the_interval_of_a_ratio_pairs_the_cases() -> None:
    errors = np.random.default_rng(1).lognormal(size=30)
    assert verdict.ratio_interval(3 * errors, errors) == (pytest.approx(3), pytest.approx(3))
    low, high = verdict.ratio_interval(errors[::-1], errors)
    assert low < 1 < high


def test_few_cases_get_no_verdict() -> None:
    assert verdict.too_few(1, "masks").startswith("No verdict: 1 held-out masks are too few")
    assert verdict.too_few(verdict.FEWEST_CASES, "masks") == ""
