"""What a table of links concludes from the ranks' times."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nbgpu.performance.links import Links, bus_factor, fit

SIZES = [1024 * 4**power for power in range(8)]
LATENCY_S, BYTES_PER_S = 50e-6, 2e9


def seconds(num_bytes: float) -> float:
    return LATENCY_S + num_bytes / BYTES_PER_S


def measured(operation: str = "all_reduce", noise: float = 0.0, **changed: Any) -> list[list[dict[str, Any]]]:
    """What two ranks return of one operation over a link that is known; rank 1 is done a little earlier."""
    draw = random.Random(1)

    def of_rank(rank: int) -> dict[str, Any]:
        rounds = [
            [
                [seconds(size) * (1 + noise * draw.random()) * (1 - 0.1 * rank) for size in SIZES]
                for _ in range(9)
            ]
            for _ in range(2)
        ]
        found = {"operation": operation, "ranks": (), "sizes_bytes": SIZES, "seconds": rounds}
        return {**found, "num_wrong": [0] * len(SIZES), "why": "", **changed}

    return [[of_rank(0)], [of_rank(1)]]


def links(found: list[list[dict[str, Any]]]) -> Links:
    return Links("gloo", ["a CPU", "a CPU"], found)


def test_a_straight_line_is_found_exactly() -> None:
    latency_s, bytes_per_s = fit(SIZES, [seconds(size) for size in SIZES])
    assert latency_s == pytest.approx(LATENCY_S)
    assert bytes_per_s == pytest.approx(BYTES_PER_S)


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """An outlier of the largest size, one percent of its time, is forty times the latency."""
    times = [seconds(size) for size in SIZES]
    times[-1] *= 1.01
    latency_s, _ = fit(SIZES, times)
    assert latency_s == pytest.approx(LATENCY_S, rel=0.05)


@pytest.mark.parametrize("latency_s", [-40e-6, 0.0])
def test_no_latency_is_negative(latency_s: float) -> None:
    sizes = SIZES[4:]
    found_s, bytes_per_s = fit(sizes, [latency_s + size / BYTES_PER_S for size in sizes])
    assert found_s == pytest.approx(0.0, abs=1e-9)
    assert bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.3)


def test_the_slowest_rank_s_time_is_that_of_the_group() -> None:
    timed = links(measured()).timed
    assert [t.num_bytes for t in timed] == SIZES
    assert [t.median_s for t in timed] == pytest.approx([seconds(size) for size in SIZES])
    assert [t.num_samples for t in timed] == [18] * len(SIZES)


def test_intervals_hold_the_truth_and_grow_with_the_noise() -> None:
    widths = []
    for noise in (0.02, 0.5):
        # Noise that only slows: half of it is in the median.
        line = links(measured(noise=noise)).of("all_reduce")
        low, high = line.latency_between_s
        assert low <= line.latency_s <= high
        assert low <= LATENCY_S * (1 + noise / 2) <= high * 1.1
        widths.append(high - low)
    assert widths[1] > 3 * widths[0]


def test_half_of_there_and_back_is_one_way() -> None:
    found = links(measured("there and back", ranks=(0, 1)))
    line = found.of("send", (0, 1))
    assert line.latency_s == pytest.approx(LATENCY_S / 2)
    assert line.bytes_per_s == pytest.approx(2 * BYTES_PER_S)
    assert "send, one way" in str(found)


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1),
        ("all_reduce", 8, 1.75),
        ("two all_reduce at once", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 2, 0.5),
        ("send", 2, 1),
    ],
)
def test_the_bus_bandwidth_is_that_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    assert bus_factor(operation, ranks) == pytest.approx(factor)


def test_what_two_at_once_gain() -> None:
    of_ranks = [
        [*alone, *at_once]
        for alone, at_once in zip(measured(), measured("two all_reduce at once"), strict=True)
    ]
    found = links(of_ranks)
    assert found.gain_of_two_at_once == pytest.approx(2)
    assert "two large all_reduce at once: x2.00" in str(found)
    # Both tensors count, so that the columns can be compared with those of one all_reduce.
    alone, at_once = found.timed[len(SIZES) - 1], found.timed[-1]
    assert at_once.num_bytes == alone.num_bytes
    assert at_once.algorithm_bytes_per_s == pytest.approx(2 * alone.algorithm_bytes_per_s)
    assert at_once.bus_bytes_per_s == pytest.approx(2 * alone.bus_bytes_per_s)


def test_a_table_without_a_size_that_was_measured_both_ways_has_no_gain() -> None:
    """A busy host has time for small sizes only of the one, and for large ones of the other."""
    other = measured("two all_reduce at once", sizes_bytes=[size + 4 for size in SIZES])
    told = str(links([[*alone, *at_once] for alone, at_once in zip(measured(), other, strict=True)]))
    assert "two all_reduce at once" in told
    assert "as fast as one after the other" not in told


def test_what_the_backend_lacks_is_named_and_the_rest_stays() -> None:
    lacking = measured("reduce_scatter", why="gloo does not support it", sizes_bytes=[], seconds=[])
    found = links([[*there, *lacks] for there, lacks in zip(measured(), lacking, strict=True)])
    assert len(found.timed) == len(SIZES)
    assert "reduce_scatter: gloo lacks it (gloo does not support it)" in str(found)
    with pytest.raises(KeyError):
        found.of("reduce_scatter")
    with pytest.raises(KeyError):
        _ = found.gain_of_two_at_once


def test_wrong_elements_and_a_drifting_machine_are_shown() -> None:
    of_ranks = measured()
    for rank in of_ranks:
        rank[0]["num_wrong"] = [1] * len(SIZES)
        rank[0]["seconds"][1] = [[1.5 * s for s in one_round] for one_round in rank[0]["seconds"][1]]
    found = links(of_ranks)
    assert [t.num_wrong for t in found.timed] == [2] * len(SIZES)
    assert [t.drift for t in found.timed] == pytest.approx([1.5] * len(SIZES))
    assert str(found).count("x1.50") == len(SIZES)
    assert list(found.frame()["wrong"]) == [2] * len(SIZES)
