"""Medians and intervals of a study's points."""

from __future__ import annotations

import random

import pytest

from nbgpu.performance.study_results import Gap, Measured, PointSummary, summarise

POINTS = [(1, 1, 4), (2, 2, 8), (4, 4, 16)]
"""Weak scaling: value, ranks, samples of a step."""


def noisy(seconds: float, seed: int, num_steps: int = 40) -> tuple[float, ...]:
    drawing = random.Random(seed)
    return tuple(seconds * drawing.uniform(0.95, 1.05) for _ in range(num_steps))


def measured(*seconds: float, repeats: int = 3) -> list[Measured]:
    return [
        Measured(point, repeat, noisy(each, 10 * point + repeat))
        for repeat in range(repeats)
        for point, each in enumerate(seconds)
    ]


def summaries(found: list[Measured]) -> list[PointSummary]:
    of_points = summarise(POINTS, found)
    assert all(isinstance(each, PointSummary) for each in of_points)
    return [each for each in of_points if isinstance(each, PointSummary)]


def test_speed_up_and_efficiency_follow_from_the_samples_per_second() -> None:
    one, two, four = summaries(measured(1.0, 1.25, 2.0))
    assert (one.relative, one.ideal, one.efficiency) == (1.0, 1.0, 1.0)
    assert two.relative == pytest.approx(1.6, rel=0.03)
    assert four.relative == pytest.approx(2.0, rel=0.03)
    assert four.efficiency == pytest.approx(0.5, rel=0.03)
    assert four.samples_per_s == pytest.approx(8, rel=0.03)


def test_intervals_hold_the_true_value_and_become_wider_where_repeats_differ() -> None:
    (_, alike, _) = summaries(measured(1.0, 1.0, 1.0))
    low, high = alike.step_between_s
    assert low <= 1.0 <= high
    assert high - low < 0.05
    found = [
        Measured(each.point, each.repeat, noisy(1.0 + 0.3 * each.repeat, each.repeat))
        if each.point == 1
        else each
        for each in measured(1.0, 1.0, 1.0)
    ]
    (_, apart, _) = summaries(found)
    assert apart.is_unsteady
    assert apart.step_between_s[1] - apart.step_between_s[0] > 0.2
    assert apart.relative_between[0] <= apart.relative <= apart.relative_between[1]


def test_a_point_that_failed_is_a_gap_and_the_others_stay() -> None:
    found = [
        Measured(each.point, each.repeat, (), why_failed="no memory") if each.point == 1 else each
        for each in measured(1.0, 1.0, 1.0)
    ]
    one, two, four = summarise(POINTS, found)
    assert two == Gap(2, 2, "no memory")
    assert isinstance(one, PointSummary)
    assert isinstance(four, PointSummary)
    assert four.ideal == 4


def test_a_repeat_that_failed_is_said_and_what_was_measured_counts() -> None:
    found = measured(1.0, 1.0, 1.0)
    found[4] = Measured(1, 1, (), why_failed="rank 1 was killed")
    two = summaries(found)[1]
    assert two.num_repeats == 2
    assert two.why_failed == "rank 1 was killed"


def test_without_the_first_point_the_next_one_is_the_reference() -> None:
    found = [each for each in measured(1.0, 1.0, 1.0) if each.point]
    nothing, two, four = summarise(POINTS, found)
    assert nothing == Gap(1, 1, "")
    assert isinstance(two, PointSummary)
    assert isinstance(four, PointSummary)
    assert (two.relative, two.ideal) == (1.0, 1.0)
    assert four.ideal == 2.0


def test_before_anything_was_measured_there_are_only_gaps() -> None:
    assert summarise(POINTS, []) == [Gap(value, ranks, "") for value, ranks, _ in POINTS]
