"""How buckets travel while the backward pass goes on."""

from __future__ import annotations

import random

import pytest

from nbgpu.performance.schedule import Bucket, Exchange, fixed_timing, play

LATENCY_S, BYTES_PER_S = 0.001, 1e6
LINE = fixed_timing(LATENCY_S, BYTES_PER_S)


def step_by_step(
    buckets: list[Bucket], latency_s: float, bytes_per_s: float, at_once: int, gain: float
) -> list[tuple[float, float]]:
    """The same in small steps of time."""
    tick_s = 2e-6
    waiting, running, now_s = list(range(len(buckets))), {}, 0.0
    begun, ended = [0.0] * len(buckets), [0.0] * len(buckets)
    while waiting or running:
        while waiting and len(running) < at_once and buckets[waiting[0]].ready_s <= now_s:
            begun[waiting[0]] = now_s
            running[waiting.pop(0)] = [latency_s, 0.0]
        moving = [bucket for bucket, (left_s, _) in running.items() if left_s <= 0]
        rate = bytes_per_s * (gain if len(moving) > 1 else 1)
        for bucket, state in list(running.items()):
            if state[0] > 0:
                state[0] -= tick_s
            else:
                state[1] += rate / len(moving) * tick_s
                if state[1] >= buckets[bucket].num_bytes:
                    ended[bucket] = now_s + tick_s
                    del running[bucket]
        now_s += tick_s
    return list(zip(begun, ended, strict=True))


def test_a_bucket_that_is_ready_at_the_end_is_exposed_whole() -> None:
    exchange = play([Bucket(0.5, 2000)], 0.5, LINE)
    assert exchange.sent == ((0.5, pytest.approx(0.503)),)
    assert exchange.exposed_s == pytest.approx(0.003)
    assert exchange.hidden_s == pytest.approx(0)


def test_an_early_bucket_is_hidden_whole() -> None:
    exchange = play([Bucket(0.1, 2000)], 0.5, LINE)
    assert exchange.exposed_s == 0
    assert exchange.hidden_s == exchange.busy_s == pytest.approx(0.003)


def test_one_queue_sends_one_after_the_other() -> None:
    exchange = play([Bucket(0, 9000), Bucket(0.002, 4000)], 0.01, LINE)
    assert exchange.sent[0] == pytest.approx((0, 0.010))
    assert exchange.sent[1] == pytest.approx((0.010, 0.015))
    assert exchange.exposed_s == pytest.approx(0.005)
    assert exchange.hidden_s == pytest.approx(0.010)


def test_two_at_once_share_the_link_and_gain() -> None:
    pair = [Bucket(0, 10_000), Bucket(0, 10_000)]
    shared = play(pair, 0, LINE, at_once=2)
    assert [end for _, end in shared.sent] == pytest.approx([0.021, 0.021])
    faster = play(pair, 0, LINE, at_once=2, gain=2.0)
    assert [end for _, end in faster.sent] == pytest.approx([0.011, 0.011])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("at_once", [1, 2])
def test_it_is_what_small_steps_of_time_give(seed: int, at_once: int) -> None:
    draw = random.Random(seed)
    ready = sorted(draw.uniform(0, 0.02) for _ in range(draw.randint(1, 7)))
    buckets = [Bucket(at_s, draw.uniform(100, 8000)) for at_s in ready]
    latency_s, gain = draw.choice([0.0, 0.0005, 0.002]), draw.choice([1.0, 1.3])
    exchange = play(buckets, 0.02, fixed_timing(latency_s, BYTES_PER_S), at_once, gain)
    expected = step_by_step(buckets, latency_s, BYTES_PER_S, at_once, gain)
    for (begin, end), (expected_begin, expected_end) in zip(exchange.sent, expected, strict=True):
        assert begin == pytest.approx(expected_begin, abs=5e-5)
        assert end == pytest.approx(expected_end, abs=5e-5)
    assert (
        exchange.busy_s == pytest.approx(exchange.hidden_s + exchange.exposed_s, abs=1e-9)
        or exchange.hidden_s == 0
    )


def test_nothing_to_send_takes_no_time() -> None:
    exchange = play([], 0.5, LINE)
    assert exchange == Exchange((), 0.5)
    assert (exchange.ended_s, exchange.busy_s, exchange.exposed_s, exchange.hidden_s) == (0.5, 0, 0, 0)
