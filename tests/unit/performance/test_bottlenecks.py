"""What is said of made steps whose bottleneck is known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbgpu.machine.links import parse_link
from nbgpu.performance.advice import explain
from nbgpu.performance.bottlenecks import Explanation, Observed
from nbgpu.performance.costs import RingCosts
from nbgpu.performance.other_buckets import ExchangeModel, regrouped
from nbgpu.performance.schedule import Bucket
from nbgpu.performance.step_parts import StepParts

DDP: dict[str, Any] = {
    "strategy": "ddp",
    "comm_hook": "none",
    "accumulate": 1,
    "num_workers": 0,
    "cache_rate": 1.0,
}


def steps(late_s: float = 0.0, last: tuple[int, ...] = (0, 1), **parts_ms: float) -> list[StepParts]:
    """Twenty steps of two ranks: 10 ms of everything that is not named; rank `last` is `late_s` behind."""
    found = []
    for number in range(1, 21):
        late = last[number % len(last)]
        for rank in range(2):
            named = {
                "data": 0,
                "forward": 30,
                "backward": 60,
                "transfer": 0,
                "optimizer": 5,
                "other": 1,
            } | parts_ms
            parts = {f"{name}_s": ms / 1000 for name, ms in named.items()}
            parts["waiting_s"] = late_s if rank != late else 0.0
            parts["backward_s"] += late_s if rank == late else 0.0
            found.append(StepParts(number, rank, sum(parts.values()), float(number), parts, 0.02, late))
    return found


def explained(
    found: list[StepParts], between_s: dict[str, float] | None = None, **settings: Any
) -> Explanation:
    return explain(Observed(found, between_s or {}, 8, DDP | settings))


@pytest.mark.parametrize(
    ("found", "between_s", "bound", "first", "said"),
    [
        (steps(), {}, "computation", None, "^Computation bounds this run: 95 ms .*nothing to change first"),
        (steps(data=120), {}, "data", "data", "^Data bound this run: a step waits 120 ms"),
        (steps(transfer=120), {}, "communication", "communication", "^Communication bounds this run: 120 ms"),
        (
            steps(0.2, last=(1,)),
            {},
            "imbalance",
            "imbalance",
            "^Imbalance bounds .*rank 0 waits 200 ms .* 100%",
        ),
        (steps(), {"validation": 0.2}, "validation", "validation", "^Validation bounds this run: 200 ms"),
        (steps(), {"checkpoints": 0.1}, "checkpoints", "checkpoints", "^Checkpoints bound this run: 100 ms"),
        (
            steps(other=100),
            {},
            "other",
            None,
            "^None of a step's parts bounds this run.*nothing to change first",
        ),
        # Where computation is the largest part, it comes first, and then what can be changed.
        (
            steps(data=50),
            {},
            "computation",
            "data",
            r"^Computation takes the largest part of a step: 95 ms .*\nChange this first: the data. A step waits 50 ms",
        ),
        (
            steps(transfer=20),
            {},
            "computation",
            "communication",
            r"^Computation .*8[23]%.*\nChange this first: communication. 20 ms of a step, 17%",
        ),
        (
            steps(0.07, last=(1,)),
            {},
            "computation",
            "imbalance",
            "first: the imbalance. Rank 0 waits 70 ms .* rank 1",
        ),
        (steps(other=60), {}, "computation", None, r"^Computation .*other 60 ms \(39%\)"),
        # Ranks that take turns to be last are alike.
        (steps(0.07), {}, "computation", None, "^Computation bounds this run"),
        (steps(0.5), {}, "computation", None, r"waiting for one another 250 ms \(42%\)"),
        (
            steps(0.2, forward=0, backward=0, optimizer=0, data=2),
            {},
            "imbalance",
            None,
            "^Imbalance bounds this run: a rank waits 100 ms of a step, .*, for the others, which take turns",
        ),
    ],
)
def test_the_largest_part_comes_first_and_then_what_to_change(
    found: list[StepParts], between_s: dict[str, float], bound: str, first: str | None, said: str
) -> None:
    told = explained(found, between_s)
    assert (told.bound, told.change_first) == (bound, first)
    assert re.search(said, str(told), re.DOTALL), str(told)


def test_cores_that_the_ranks_lacked_are_named_and_come_first_where_they_cost_most() -> None:
    told = explain(Observed(steps(transfer=20), {}, 8, DDP, cores_each=0.1, coreless_share=0.8))
    assert (told.bound, told.change_first) == ("computation", "cores")
    assert "Change this first: the cores. For 92.8 ms of a step, 80%" in told.sentences[1]
    assert "no core, and used 0.1 cores. Other programs had them" in told.sentences[1]
    (advice,) = told.advice
    assert not advice.settings
    assert advice.step_s == pytest.approx(0.2 * told.step_s)
    # A larger cause comes before them, and they are named all the same.
    told = explain(Observed(steps(transfer=80), {}, 8, DDP, cores_each=0.5, coreless_share=0.3))
    assert told.change_first == "communication"
    assert "All of these times are longer than they need be: for 52.8 ms of a step, 30%" in str(told)
    assert "core" not in str(explained(steps(transfer=80)))


def test_where_nothing_would_help_nothing_is_advised() -> None:
    assert explained(steps()).advice == ()
    assert "would" not in str(explained(steps()))


def test_the_most_useful_advice_comes_first_and_says_what_it_would_bring() -> None:
    first, second = explained(steps(transfer=80)).advice
    # Of 100 ms of exchange 20 are hidden. Half the bytes leave 50, of which 20 stay hidden.
    assert first.settings == {"comm_hook": "fp16"}
    assert first.step_s == pytest.approx(0.126)
    assert second.settings == {"accumulate": 2}
    assert first.relative == pytest.approx(0.176 / 0.126)
    assert "at best take 126 ms in place of 176 ms" in first.text


def test_validations_become_as_rare_as_is_enough() -> None:
    (advice,) = explained(steps(), {"validation": 0.2}, val_every=1).advice
    assert advice.settings == {"val_every": 32}
    assert advice.step_s == pytest.approx(0.096 + 0.2 / 32)


@pytest.mark.parametrize(
    ("data_ms", "settings", "advised", "step_s"),
    [
        # Without workers a batch takes 96 ms, which is a step; by two workers it takes 192 ms at 4 workers.
        (96, {"num_workers": 0}, {"num_workers": 1}, 0.096),
        (96, {"num_workers": 4}, {"num_workers": 8}, 0.096),
        (192, {"num_workers": 2}, {"num_workers": 6}, 0.096),
        (960, {"num_workers": 2}, {"num_workers": 8}, 2 * 1.056 / 8),
        (96, {"num_workers": 8}, None, 0.0),
        (96, {"num_workers": 0, "transforms_on": "gpu"}, None, 0.0),
        (96, {"data": "a folder", "cache_rate": 0.5, "num_workers": 8}, {"cache_rate": 1.0}, 0.096),
        (96, {"data": "a folder", "cache_rate": 0.5, "replace_rate": 0.2, "num_workers": 8}, None, 0.0),
    ],
)
def test_workers_are_advised_where_they_are_too_few(
    data_ms: float, settings: dict[str, Any], advised: dict[str, Any] | None, step_s: float
) -> None:
    advice = explained(steps(data=data_ms), **settings).advice
    assert [each.settings for each in advice] == ([] if advised is None else [advised])
    assert [each.step_s for each in advice] == [pytest.approx(step_s)] * len(advice)


def test_a_gradient_that_is_compressed_already_is_not_compressed_again() -> None:
    told = explained(steps(transfer=80), comm_hook="fp16")
    assert [advice.settings for advice in told.advice] == [{"accumulate": 2}]


def test_what_is_said_adds_up() -> None:
    told = explained(steps(data=20, transfer=10), {"checkpoints": 0.01})
    assert told.step_s == pytest.approx(0.096 + 0.03 + 0.01)
    assert "transfer" not in str(told)
    assert "communication 10 ms (7%)" in str(told)


def with_statistics(seconds: dict[int, float]) -> list[StepParts]:
    """Steps in which the ranks wait for BatchNorm's statistics."""
    return [
        StepParts(
            step.step,
            step.rank,
            step.step_s + max(seconds.values()),
            step.begun_at_s,
            {**step.parts_s, "statistics_s": seconds[step.rank]},
            step.hidden_s,
            step.last_rank,
        )
        for step in steps()
    ]


def test_statistics_that_no_rank_is_late_for_bound_the_run() -> None:
    told = explained(with_statistics({0: 0.09, 1: 0.09}), sync_batchnorm=True)
    assert told.change_first == "statistics"
    assert str(told).count("90 ms") == 1, "a part that was named is not listed with the others"
    (advice,) = told.advice
    assert advice.settings == {"sync_batchnorm": False}
    assert advice.step_s == pytest.approx(told.step_s - 0.09)


def test_a_rank_for_which_others_wait_where_statistics_are_exchanged_is_an_imbalance() -> None:
    told = explained(with_statistics({0: 0.09, 1: 0.005}), sync_batchnorm=True)
    assert told.change_first == "imbalance"
    assert "Rank 0 waits 85 ms" in told.sentences[1]
    assert "waiting for one another" not in str(told)


def test_a_rank_whose_data_come_late_is_bound_by_its_data() -> None:
    found = [
        StepParts(
            step.step,
            step.rank,
            step.step_s,
            step.begun_at_s,
            {**step.parts_s, "data_s": 0.07 if step.rank == 1 else 0.0},
            step.hidden_s,
            step.last_rank,
        )
        for step in steps(0.07, last=(1,), backward=0)
    ]
    told = explained(found)
    assert told.bound == "data"
    assert "rank 1, for which the others wait, itself waits in each step 70 ms" in told.sentences[0]


def test_a_rank_that_waits_for_its_data_is_named_with_its_own_time() -> None:
    data_ms, parts = (
        (90, 100, 0, 0),
        {"forward_s": 0.03, "backward_s": 0.06, "transfer_s": 0.0, "optimizer_s": 0.005},
    )
    found = []
    for number in range(1, 21):
        for rank in range(4):
            own = {
                **parts,
                "data_s": data_ms[rank] / 1e3,
                "waiting_s": 0.0 if rank == 0 else 0.09,
                "other_s": 0.001,
            }
            found.append(StepParts(number, rank, sum(own.values()), float(number), own, 0.02, 0))
    told = explained(found)
    assert told.bound == "data"
    assert "rank 0, for which the others wait, itself waits in each step 90 ms" in told.sentences[0]


def linked(num_buckets: int, num_bytes: float, link: str) -> ExchangeModel:
    ready_s = [0.06 * (index + 1) / num_buckets for index in range(num_buckets)]
    buckets = [Bucket(ready, num_bytes / num_buckets) for ready in ready_s]
    return ExchangeModel(buckets, 0.06, RingCosts(parse_link(link)), 2)


def test_many_buckets_over_a_link_with_a_long_latency_become_fewer() -> None:
    exchange = linked(40, 4e5, "10Gbit/s,2ms")
    found = steps(transfer=1e3 * exchange.exposed_s())
    told = explain(Observed(found, {}, 8, DDP | {"bucket_mb": 0.01}, exchange))
    assert "the latency of its 40 buckets, 160 ms" in told.sentences[0]
    assert told.advice[0].settings == {"bucket_mb": 1.0}
    assert "With one bucket in place of 40" in told.advice[0].text
    # The one bucket is ready at the end, and needs 4 ms and its bytes.
    assert told.advice[0].step_s == pytest.approx(0.096 + 0.004 + 4e5 / 1.25e9, rel=0.01)


def test_one_large_bucket_over_a_slow_link_becomes_several() -> None:
    exchange = linked(20, 20 * 2**20, "5Gbit/s,0.1ms")
    whole = ExchangeModel([Bucket(0.06, exchange.num_bytes)], 0.06, exchange.costs, 2)
    found = steps(transfer=1e3 * whole.exposed_s())
    told = explain(Observed(found, {}, 8, DDP | {"bucket_mb": 100, "comm_hook": "bf16"}, whole))
    best = told.advice[0]
    assert best.settings["bucket_mb"] < 5
    assert best.step_s < told.step_s - 0.02


def test_buckets_that_are_as_good_as_any_stay() -> None:
    exchange = linked(1, 4e5, "10Gbit/s,30ms")
    found = steps(transfer=1e3 * exchange.exposed_s())
    told = explain(Observed(found, {}, 8, DDP | {"bucket_mb": 25, "comm_hook": "fp16"}, exchange))
    assert [advice.settings for advice in told.advice] == [{"accumulate": 2}]


def test_other_buckets_hold_the_same_gradients() -> None:
    buckets = linked(7, 30 * 2**20, "1GbE").buckets
    for mb in (0.5, 1, 2.5, 25, 100):
        made = regrouped(buckets, mb * 2**20)
        assert sum(bucket.num_bytes for bucket in made) == pytest.approx(30 * 2**20)
        assert made[-1].ready_s == pytest.approx(0.06)
        assert [bucket.ready_s for bucket in made] == sorted(bucket.ready_s for bucket in made)
        assert all(bucket.num_bytes <= mb * 2**20 * 1.001 for bucket in made)
