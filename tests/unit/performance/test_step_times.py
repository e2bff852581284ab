"""What is concluded from the times of a step's parts, and modelled with them."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.errors import ConfigError
from nbgpu.performance.links import Links
from nbgpu.performance.steps import StepTimes

MIB = 2**20
LATENCY_S, BYTES_PER_S = 1e-3, 1e9


def step(factor: float = 1.0, exchange_s: float = 0.0) -> dict[str, Any]:
    return {
        "forward_s": 0.03 * factor,
        "backward_s": 0.06 * factor,
        "optimizer_s": 0.01 * factor,
        "step_s": 0.1 * factor + exchange_s,
        "buckets": [(0.02 * factor, 4 * MIB), (0.06 * factor, 25 * MIB)],
    }


def measured(again: float = 1.0, exchange_s: float = 0.02) -> list[dict[str, list[dict[str, Any]]]]:
    """Two ranks, of which rank 1 takes a fifth longer."""
    return [
        {
            "alone": [step(factor)] * 5,
            "together": [step(1.2, exchange_s)] * 5,
            "alone again": [step(factor * again)] * 5,
        }
        for factor in (1.0, 1.2)
    ]


def links(world_size: int = 2) -> Links:
    sizes = [1024 * 4**power for power in range(9)]
    found = {
        "operation": "all_reduce",
        "ranks": (),
        "sizes_bytes": sizes,
        "seconds": [[[LATENCY_S + size / BYTES_PER_S for size in sizes]] * 3] * 2,
        "num_wrong": [0] * len(sizes),
        "why": "",
    }
    at_once = {**found, "operation": "two all_reduce at once"}
    return Links("gloo", ["a CPU"] * world_size, [[found, at_once]] * world_size)


def times(**changed: Any) -> StepTimes:
    return StepTimes("a recipe", "nccl", 4, measured(**changed))


def test_the_parts_are_those_of_the_slowest_rank() -> None:
    found = times()
    assert found.slowest_rank == 1
    assert found.share_of_slowest == 1
    assert found.computing_s == pytest.approx(0.12)
    assert (found.forward_s, found.backward_s, found.optimizer_s) == pytest.approx((0.036, 0.072, 0.012))
    assert found.step_s == pytest.approx(0.14)
    assert found.exposed_s == pytest.approx(0.02)
    assert [bucket.ready_s for bucket in found.buckets] == pytest.approx([0.024, 0.072])
    assert found.num_bytes == 29 * MIB
    assert "the others waited for rank 1 in 100% of the steps" in str(found)
    assert "29.0 MiB of gradients in 2 buckets, ready 24.0, 72.0 ms" in str(found)


def test_a_disturbed_measurement_says_so() -> None:
    assert "disturbed" not in str(times())
    assert "a step took 1.30 times as long afterwards. Measure again" in str(times(again=1.3))


def test_the_model_at_the_measured_size_and_beyond() -> None:
    modelled = times().predict(links(), ranks=(1, 2, 8))
    one, two, eight = modelled.steps
    assert one.step_s == pytest.approx(0.12)
    assert one.efficiency == 1
    # The first bucket is hidden; the last one is ready when the backward pass ends.
    assert two.step_s == pytest.approx(0.12 + LATENCY_S + 25 * MIB / BYTES_PER_S, rel=1e-3)
    assert two.samples_per_s == pytest.approx(8 / two.step_s)
    # A ring of eight: seven times the latency of two ranks, and 2 * 7/8 times the bytes on each link.
    assert eight.step_s == pytest.approx(0.12 + 7 * LATENCY_S + 1.75 * 25 * MIB / BYTES_PER_S, rel=1e-3)
    assert [s.is_beyond for s in modelled.steps] == [False, False, True]
    text = str(modelled)
    assert text.startswith("modelled, not measured")
    assert f"measured: 140.00 ms, the model is off by {two.step_s / 0.14 - 1:+.0%}" in text
    assert text.count("beyond what was measured") == 1
    assert list(modelled.frame()["beyond_measured"]) == [False, False, True]


def test_links_of_more_ranks_are_taken_back_to_fewer() -> None:
    """Links that four ranks measured say the same of a ring of two as the formulas do."""
    (two,) = times().predict(links(4), ranks=(2,)).steps
    exposed_s = LATENCY_S / 3 + 25 * MIB / (1.5 * BYTES_PER_S)
    assert two.step_s == pytest.approx(0.12 + exposed_s, rel=1e-3)


@pytest.mark.parametrize("ranks", [(0,), (2, 1025)])
def test_no_such_number_of_ranks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="1 to 1024"):
        times().predict(links(), ranks=ranks)
