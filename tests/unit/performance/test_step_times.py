"""What is concluded from the times of a step's parts, and modelled with them."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.errors import ConfigError
from nbgpu.performance import laws
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
        "last_backward_s": 0.06 * factor,
        "micro_batches": 1,
        "buckets": [(0.02 * factor, 4 * MIB), (0.06 * factor, 25 * MIB)],
        "blocks": [(20 * MIB, 0.02 * factor), (8 * MIB, 0.01 * factor)],
        "rest_bytes": 1 * MIB,
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
    pair_s = [LATENCY_S + 2 * size / BYTES_PER_S for size in sizes]
    others = [
        {**found, "operation": "two all_reduce at once", "seconds": [[pair_s] * 3] * 2},
        {**found, "operation": "all_gather"},
        {**found, "operation": "reduce_scatter"},
    ]
    return Links("nccl", ["a GPU"] * world_size, [[found, *others]] * world_size)


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


def test_everything_wrong_with_a_prediction_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        times().predict(links(), ranks=(0, 6), link="10GbE", ranks_per_node=4, strategy="single")
    lines = str(caught.value).splitlines()
    assert lines == [
        "ranks = [0] is not valid: 1 to 1024",
        "give either links=, from measure_links(), or link=, such as '10GbE'",
        "strategy='single' is not modelled, only 'ddp' and 'fsdp'",
        "ranks_per_node= and between= go together",
        "ranks = [6] do not fill nodes of 4",
    ]
    with pytest.raises(ConfigError, match="is not a rate"):
        times().predict(link="fast,1ms")
    with pytest.raises(ConfigError, match="either links="):
        times().predict()


def test_a_link_that_was_only_described() -> None:
    modelled = times().predict(link="1Gbit/s,1ms", ranks=(1, 2, 4))
    _, two, four = modelled.steps
    # The last bucket: two steps of the ring, and 8 ns a byte.
    assert two.step_s == pytest.approx(0.12 + 2e-3 + 25 * MIB * 8e-9, rel=1e-6)
    # Both in one queue from when the first is ready: six steps each, and half as many bytes again.
    assert four.step_s == pytest.approx(0.12 - 0.072 + 0.024 + 2 * 6e-3 + 1.5 * 29 * MIB * 8e-9, rel=1e-6)
    # A tree of four has two levels in place of three steps.
    assert four.between_s[0] == pytest.approx(four.step_s - 2 * 2e-3)
    assert [step.is_beyond for step in modelled.steps] == [False, True, True]
    text = str(modelled)
    assert text.count("over links not measured") == 2
    assert "a ring over 1Gbit/s, 1ms (125 MB/s each way, 1 ms)" in text


def test_several_nodes() -> None:
    modelled = times().predict(links(), ranks=(2, 8), ranks_per_node=2, between="8 Gbit/s, 100us")
    two, eight = modelled.steps
    inside = times().predict(links(), ranks=(2,)).steps[0]
    assert two.step_s == pytest.approx(inside.step_s)
    last_bytes = 25 * MIB
    on_node_s = 2 * (LATENCY_S + last_bytes / BYTES_PER_S)
    between_s = 2 * 3 * 100e-6 + 1.5 * last_bytes / 1e9
    assert eight.exchange is not None
    begin_s, end_s = eight.exchange.sent[-1]
    assert end_s - begin_s == pytest.approx(on_node_s + between_s, rel=1e-3)
    assert "2 ranks on a node, and between the nodes a ring over 8 Gbit/s, 100us" in str(modelled)


def test_fsdp_from_a_step_that_was_measured_with_ddp() -> None:
    modelled = times().predict(links(), ranks=(1, 2), strategy="fsdp")
    one, two = modelled.steps
    assert one.step_s == pytest.approx(0.12)
    # 1 MiB, 20 MiB and 8 MiB are gathered, 20 and 8 MiB again in the backward pass, and all are scattered.
    assert two.exchange is not None
    assert len(two.exchange.sent) == 3 + 2 + 3
    sent_s = 8 * LATENCY_S + (29 + 28 + 29) * MIB / BYTES_PER_S
    assert two.exchange.busy_s == pytest.approx(sent_s, rel=1e-3)
    assert 0 < two.exchange.exposed_s < two.exchange.busy_s
    # A rank updates half of the weights.
    assert two.step_s == pytest.approx(0.12 - 0.006 + two.exchange.exposed_s)
    assert "the model is off" not in str(modelled)


def test_only_the_last_micro_batch_hides_the_exchange() -> None:
    """With two micro-batches the buckets travel in the second backward pass."""
    of_ranks = measured()
    for rank in of_ranks:
        for steps in rank.values():
            steps[:] = [
                {**each, "micro_batches": 2, "last_backward_s": each["backward_s"] / 2} for each in steps
            ]
    found = StepTimes("a recipe", "nccl", 4, of_ranks)
    (two,) = found.predict(links(), ranks=(2,)).steps
    # The backward pass ends before the last bucket is ready by these times: all of it is exposed.
    assert two.step_s == pytest.approx(0.12 + 0.036 + LATENCY_S + 25 * MIB / BYTES_PER_S, rel=1e-3)


def test_where_the_exchange_stops_being_hidden() -> None:
    modelled = times().predict(links(), ranks=(1, 2, 64))
    for share in (0.3, 0.5):
        hidden = modelled.hidden_up_to(share)
        (last, first) = times().predict(links(), ranks=(hidden.ranks, hidden.ranks + 1)).steps
        assert last.step_s <= (1 + share) * 0.12 < first.step_s
        assert hidden.batch_factor is not None
        assert hidden.batch_factor > 1
        assert hidden.gradients_factor is None or hidden.gradients_factor < 1
        ends = (
            f"At 64 ranks it is hidden with {hidden.batch_factor:.3g} times the batch. Fewer bytes do not, because",
            f"At 64 ranks it is hidden with {hidden.batch_factor:.3g} times the batch, or with 0.",
        )
        assert ends[hidden.gradients_factor is not None] in str(hidden)
    never = modelled.hidden_up_to(0.05)
    assert never.ranks == 1
    assert str(never).startswith(
        "the exchange is not hidden: with the fewest ranks it adds more than 5% to a step"
    )
    assert str(never) in str(modelled)
    always = times().predict(link="1000 GB/s, 1ns", ranks=(1, 8))
    assert "hides the exchange: it adds at most 5% to a step, up to 1024 ranks" in str(always)
    with pytest.raises(ConfigError, match="share = 0"):
        modelled.hidden_up_to(0)


def test_the_picture_says_that_it_is_modelled_and_tells_kinds_of_lines_apart() -> None:
    law = laws.fit_amdahl({1: [1.0] * 3, 2: [0.6] * 3})
    picture = times().predict(links(), ranks=(1, 2, 4, 8)).figure(laws=[law])
    assert picture.figure["layout"]["title"]["text"].startswith("modelled: a recipe")
    traces = {trace["name"]: trace for trace in picture.figure["data"]}
    assert traces["modelled"]["x"] == [1, 2]
    assert traces["modelled, beyond"]["x"] == [2, 4, 8]
    assert traces["Amdahl's law, fitted"]["line"]["dash"] == "solid"
    assert traces["Amdahl's law, beyond"]["line"]["dash"] == "dash"
    assert traces["modelled"]["line"]["dash"] == "solid"
    assert traces["modelled, beyond"]["line"]["dash"] == "dash"
    assert traces["measured"]["mode"] == "markers"
    assert traces["measured"]["y"] == pytest.approx([2 * 0.12 / 0.14])
    assert str(picture).startswith("modelled: a recipe")
