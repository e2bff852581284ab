"""Moments of several hosts on one clock."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.performance.clocks import ClockComparison, Clocks
from nbgpu.protocol.records import Event

FIRST = ClockComparison(1000.0, (0.0, 50.0), (0.0, 2e-5))
LAST = ClockComparison(2000.0, (0.0, 50.001), (0.0, 3e-5))


def test_ranks_of_one_host_need_no_comparison() -> None:
    clocks = Clocks()
    assert clocks.of_rank_0(3, 12.5) == 12.5
    assert clocks.error_s == 0
    assert "one machine: offset 0" in clocks.in_words()


def test_an_offset_is_added() -> None:
    clocks = Clocks([FIRST])
    assert [clocks.of_rank_0(rank, 100.0) for rank in (0, 1)] == [100.0, 150.0]


def test_between_two_comparisons_the_offset_changes_evenly() -> None:
    clocks = Clocks([LAST, FIRST])
    assert clocks.of_rank_0(1, 1450.0) == pytest.approx(1500.0005, abs=1e-6)
    assert clocks.of_rank_0(1, 100.0) == 150.0
    assert clocks.of_rank_0(1, 5000.0) == pytest.approx(5050.001)
    assert clocks.error_s == 3e-5
    assert "an error of at most 30 us" in clocks.in_words()


@pytest.mark.parametrize(
    "detail", [{}, {"offsets_s": [0.0], "errors_s": [0.0, 0.0], "at_s": 1.0}, {"offsets_s": "no"}]
)
def test_damaged_comparisons_are_passed_over(detail: dict[str, Any]) -> None:
    good = {"offsets_s": [0.0, 50.0], "errors_s": [0.0, 2e-5], "at_s": 1000.0}
    events = [Event(0, n, 0.0, 0, "clocks", "", d) for n, d in enumerate((detail, good))]
    assert Clocks.of(events, 2).of_rank_0(1, 1.0) == 51.0
