"""The smoothed line, which must not lag behind what it smooths."""

from __future__ import annotations

import math

import pytest

from nbgpu.ui.run.smoothing import smoothed


def test_a_trend_is_met_everywhere_also_at_its_end() -> None:
    falling = [10 - i / 10 for i in range(80)]
    assert smoothed(falling) == pytest.approx(falling)


def test_a_curve_is_met_closely_where_a_mean_of_the_past_lags() -> None:
    curve = [math.exp(-i / 60) for i in range(200)]
    assert max(abs(a - b) for a, b in zip(smoothed(curve), curve, strict=True)) < 0.02


def test_noise_is_calmed() -> None:
    noise = [1.0 if i % 2 else -1.0 for i in range(100)]
    assert abs(smoothed(noise)[50]) < 0.05


def test_nan_is_skipped_and_few_points_are_enough() -> None:
    assert smoothed([]) == []
    assert smoothed([3.0]) == [3.0]
    assert smoothed([4.0, math.nan, 4.0]) == pytest.approx([4, 4, 4])
    assert all(map(math.isnan, smoothed([math.nan, math.inf])))


def test_the_live_panel_has_the_same_numbers() -> None:
    """widgets/test/series.test.ts has them, too."""
    line = [f"{value:.4f}" for value in smoothed([3, 1, math.nan, 2, 5, -1, 0])]
    assert line == ["2.6316", "2.2860", "2.0735", "1.8278", "1.5247", "0.9303", "0.4419"]
