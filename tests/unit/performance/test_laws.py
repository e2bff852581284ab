"""The laws of scaling, on times that follow them."""

from __future__ import annotations

import random

import pytest

from nbgpu.performance import laws

RANKS = (1, 2, 4, 8)


def strong(serial_fraction: float, noise: float = 0.0, repeats: int = 5) -> dict[int, list[float]]:
    draw = random.Random(3)
    return {
        n: [7.0 / laws.amdahl(n, serial_fraction) * (1 + noise * draw.uniform(-1, 1)) for _ in range(repeats)]
        for n in RANKS
    }


def test_the_laws_are_those_of_the_papers() -> None:
    # Amdahl: with half the work serial no number of ranks brings more than twice the speed.
    assert laws.amdahl(1, 0.3) == 1
    assert laws.amdahl(10**9, 0.5) == pytest.approx(2)
    # Gustafson 1988: 1024 processors and serial fractions of 0.4 to 0.8 % give speed-ups of 1016 to 1021.
    assert laws.gustafson(1024, 0.008) == pytest.approx(1016, abs=1)
    assert laws.gustafson(1024, 0.004) == pytest.approx(1020, abs=1)
    # Karp and Flatt undo Amdahl's law.
    assert laws.karp_flatt(8, laws.amdahl(8, 0.07)) == pytest.approx(0.07)
    assert laws.karp_flatt(4, 4.4) < 0


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.4, 1.0])
def test_times_by_amdahl_give_their_serial_fraction(fraction: float) -> None:
    times = strong(fraction)
    law = laws.fit_amdahl(times)
    assert law.serial_fraction.value == pytest.approx(fraction, abs=1e-9)
    assert law.serial_fraction.between == pytest.approx((fraction, fraction), abs=1e-9)
    assert law.speedup(64).value == pytest.approx(laws.amdahl(64, fraction))
    assert law.largest_ranks == 8
    for found in laws.serial_fractions(times).values():
        assert found.value == pytest.approx(fraction, abs=1e-9)


def test_times_by_gustafson_give_their_serial_fraction() -> None:
    times = {n: [3.0 * n / laws.gustafson(n, 0.1)] * 3 for n in RANKS}
    law = laws.fit_gustafson(times)
    assert law.serial_fraction.value == pytest.approx(0.1)
    assert law.speedup(16).value == pytest.approx(laws.gustafson(16, 0.1))
    assert laws.speedups(times, is_weak=True)[8].value == pytest.approx(laws.gustafson(8, 0.1))


def test_intervals_hold_the_truth_and_grow_with_the_noise() -> None:
    widths = []
    for noise in (0.01, 0.1):
        law = laws.fit_amdahl(strong(0.1, noise, repeats=9))
        low, high = law.serial_fraction.between
        assert low <= 0.1 <= high
        assert low <= law.serial_fraction.value <= high
        speedup = law.speedup(64)
        assert speedup.between[0] <= speedup.value <= speedup.between[1]
        widths.append(high - low)
    assert widths[1] > 3 * widths[0]


def test_a_growing_overhead_shows_in_karp_and_flatt() -> None:
    times = {n: [1 / n + 0.01 * (n - 1)] for n in RANKS}
    fractions = [found.value for found in laws.serial_fractions(times).values()]
    assert fractions == sorted(fractions)
    assert fractions[-1] > 1.5 * fractions[0]


def test_a_gap_is_left_out() -> None:
    times = {**strong(0.2), 4: []}
    assert list(laws.speedups(times)) == [1, 2, 8]
    assert laws.fit_amdahl(times).serial_fraction.value == pytest.approx(0.2)


def test_faster_than_ideal_is_no_negative_serial_work() -> None:
    times = {1: [10.0], 2: [4.0]}
    assert laws.fit_amdahl(times).serial_fraction.value == 0
    assert laws.serial_fractions(times)[2].value < 0


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({2: [1.0], 4: [0.5]}, "one rank is missing"),
        ({1: [], 2: [1.0]}, "one rank is missing"),
        ({1: [1.0]}, "two numbers of ranks"),
        ({1: [1.0], 2: []}, "two numbers of ranks"),
        ({1: [1.0], 2: [0.0]}, r"times of \[2\] ranks are not numbers above 0"),
        ({1: [1.0], 2: [float("nan")]}, r"times of \[2\] ranks"),
    ],
)
def test_what_no_law_can_be_fitted_to_is_refused(times: dict[int, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laws.fit_amdahl(times)
