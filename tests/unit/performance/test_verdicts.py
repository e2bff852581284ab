"""What tables and lines of a study decide, and where they say that nothing is decided."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from nbgpu.client.scaling import study_table
from nbgpu.config import ClusterConfig
from nbgpu.performance.study_results import Gap, Measured, PointSummary, summarise
from nbgpu.planning.studies import StudyConfig, StudyPlan


def plan(vary: str, values: Sequence[Any], repeats: int, mode: str = "weak") -> StudyPlan:
    config = StudyConfig.checked(repeats=repeats, mode=mode)
    return StudyPlan("autoencoder", config, ClusterConfig(), vary, list(values), {})


def measured(medians: Sequence[Sequence[float]], noise: float = 0.01) -> list[Measured]:
    """Repeats of points by their medians; steps within a repeat vary by `noise`."""
    draw = random.Random(7)
    return [
        Measured(point, repeat, tuple(seconds * draw.uniform(1 - noise, 1 + noise) for _ in range(20)))
        for point, of_point in enumerate(medians)
        for repeat, seconds in enumerate(of_point)
    ]


def of_ranks(medians: Sequence[Sequence[float]], ranks: Sequence[int]) -> list[PointSummary | Gap]:
    return summarise([(n, n, 4 * n) for n in ranks], measured(medians))


def of_sizes(medians: Sequence[Sequence[float]], values: Sequence[Any]) -> list[PointSummary | Gap]:
    return summarise([(value, 2, 8) for value in values], measured(medians))


def test_a_speed_up_above_the_number_of_ranks_is_not_decided() -> None:
    ranks = [1, 2]
    medians = [(3.0, 3.1, 3.2), (0.2, 0.21, 0.19)]
    made = plan("ranks", ranks, 3)
    summary = of_ranks(medians, ranks)
    said = "\n".join(study_table.lines(made, summary))
    assert "ranks = 2: " in said
    assert "not decided: a speed-up above the number of ranks is not one of more ranks" in said
    assert "repeats=5" in said
    assert study_table.verdict(made, summary, 2).startswith("not decided: speed-up 3")
    (law,) = study_table.law_lines(made, measured(medians), summary)
    assert law.startswith("no law is fitted: a speed-up above")


def test_a_speed_up_stands_beside_its_interval() -> None:
    ranks = [1, 2]
    summary = of_ranks([(1.0, 1.01, 0.99), (1.25, 1.26, 1.24)], ranks)
    assert re.fullmatch(
        r"speed-up 1\.6\d? \(1\.[56]\d to 1\.6\d\)", study_table.verdict(plan("ranks", ranks, 3), summary, 2)
    )


def test_one_repeat_has_no_interval_and_decides_nothing() -> None:
    ranks = [1, 2]
    medians = [(1.0,), (1.2,)]
    made = plan("ranks", ranks, 1)
    summary = of_ranks(medians, ranks)
    header, rows = study_table.header_and_rows(made, summary)
    assert {row[header.index("95 % interval")] for row in rows} == {"one repeat"}
    assert study_table.verdict(made, summary, 2) == (
        f"not decided: speed-up {rows[1][header.index('speed-up')]}; one repeat has no interval. Measure with repeats=3"
    )
    (law,) = study_table.law_lines(made, measured(medians), summary)
    assert "one repeat has no interval" in law
    assert " to " not in law


def test_points_whose_intervals_overlap_are_not_decided_and_said_how_they_would_be() -> None:
    values = [0.05, 1, 25]
    made = plan("bucket_mb", values, 3)
    summary = of_sizes([(1.0, 1.2, 1.1), (1.15, 1.0, 1.12), (2.0, 2.1, 2.2)], values)
    assert "bucket_mb = 1: " in (said := "\n".join(study_table.lines(made, summary)))
    assert "not decided: its interval holds 1" in said
    assert "bucket_mb = 25: the repeats differ" in said or "bucket_mb = 25: not" not in said
    fastest = study_table.verdict(made, summary, None)
    assert fastest.startswith("not decided: bucket_mb=")
    assert "repeats" in fastest
    assert study_table.verdict(made, summary, 1).startswith(
        "not decided: samples per second by the first point"
    )


def test_the_repeats_that_would_tell_are_those_of_the_hardest_of_the_points_that_overlap() -> None:
    """The second is decided already; the third is nearly as fast in one of its repeats."""
    values = ["a", "b", "c"]
    made = plan("bucket_mb", [1, 2, 3], 3)
    summary = of_sizes([(1.0, 1.001, 1.002), (1.03, 1.031, 1.032), (1.2, 0.95, 1.05)], values)
    said = study_table.verdict(made, summary, None)
    assert "whose interval overlaps that of c" in said
    assert "repeats=16 would probably tell" in said


def test_what_the_intervals_decide_is_said_without_doubt() -> None:
    values = ["none", "fp16"]
    made = plan("comm_hook", values, 3)
    summary = of_sizes([(1.0, 1.01, 1.02), (0.5, 0.51, 0.52)], values)
    assert "not decided" not in "\n".join(study_table.lines(made, summary))
    assert study_table.verdict(made, summary, "fp16").startswith("samples per second by the first point 1.9")
    assert study_table.verdict(made, summary, None).startswith("comm_hook=fp16 with ")
    with pytest.raises(KeyError):
        study_table.verdict(made, summary, "bf16")
