"""The parts of a step, worked out from the records of all ranks."""

from __future__ import annotations

import pytest

from nbgpu.performance.step_parts import middle_half, parts_of, slowest_rank
from nbgpu.protocol.records import Sample


def sample(
    rank: int, step: int = 1, ready_at_s: float | None = 10.0, exposed_s: float = 0.0, **more: float
) -> Sample:
    """A step of a second: .1 data, .2 forward, .3 backward, .1 optimizer, and what is exposed."""
    values = {
        "step_s": 1.0,
        "data_s": 0.1,
        "forward_s": 0.2,
        "backward_s": 0.3,
        "optimizer_s": 0.1,
        "begun_at_s": 9.0,
    }
    if ready_at_s is not None:
        values |= {
            "ready_at_s": ready_at_s,
            "exposed_s": exposed_s,
            "hidden_s": 0.05,
            "exchange_s": 0.05 + exposed_s,
        }
    return Sample(rank=rank, seq=0, time_s=0.0, step=step, values=values | more)


def test_the_parts_add_up_to_the_step() -> None:
    for parts in parts_of([sample(0, exposed_s=0.2), sample(1, ready_at_s=10.15, exposed_s=0.05)], 2):
        assert sum(parts.parts_s.values()) == pytest.approx(parts.step_s)


def test_the_rank_that_was_ready_last_is_the_one_that_was_waited_for() -> None:
    first, last = parts_of([sample(0, exposed_s=0.2), sample(1, ready_at_s=10.15, exposed_s=0.05)], 2)
    assert first.last_rank == last.last_rank == 1
    assert first.parts_s["waiting_s"] == pytest.approx(0.15)
    assert first.parts_s["transfer_s"] == pytest.approx(0.05)
    assert last.parts_s["waiting_s"] == 0
    assert last.parts_s["transfer_s"] == pytest.approx(0.05)


def test_without_buckets_there_is_no_exchange_to_speak_of() -> None:
    (alone,) = parts_of([sample(0, ready_at_s=None)], 1)
    assert alone.last_rank is None
    assert alone.hidden_s is None
    assert "waiting_s" not in alone.parts_s
    assert slowest_rank([alone]) is None


def test_on_several_hosts_the_wait_is_part_of_the_transfer() -> None:
    samples = [sample(rank, exposed_s=0.2) for rank in range(2)]
    for each in samples:
        del each.values["ready_at_s"]
    first, _ = parts_of(samples, 2)
    assert first.last_rank is None
    assert first.parts_s["transfer_s"] == pytest.approx(0.2)
    assert "waiting_s" not in first.parts_s
    assert sum(first.parts_s.values()) == pytest.approx(first.step_s)


def test_a_step_that_a_rank_has_not_recorded_does_not_count() -> None:
    assert parts_of([sample(0), sample(1), sample(0, step=2)], 2)[-1].step == 1


def test_a_step_that_was_repeated_counts_as_it_was_done_last() -> None:
    (parts,) = parts_of([sample(0, ready_at_s=None), sample(0, ready_at_s=None, step_s=2.0)], 1)
    assert parts.step_s == 2.0


def test_attempts_at_a_step_are_not_mixed() -> None:
    """Rank 0 repeats step 2 a minute later, and the run ends before rank 1 has; both repeat step 1."""
    first = [sample(rank, step) for step in (1, 2) for rank in (0, 1)]
    again = [sample(0, begun_at_s=69.0), sample(1, begun_at_s=69.0), sample(0, step=2, begun_at_s=70.0)]
    parts = parts_of([*first, *again], 2)
    assert [(p.step, p.rank, p.begun_at_s) for p in parts] == [(1, 0, 69.0), (1, 1, 69.0)]


def test_what_a_lost_rank_did_before_does_not_hide_a_step_that_the_others_repeat() -> None:
    parts = parts_of(
        [sample(rank) for rank in (0, 1, 2)] + [sample(rank, begun_at_s=69.0) for rank in (0, 1)], 2
    )
    assert [(p.step, p.rank, p.begun_at_s) for p in parts] == [(1, 0, 69.0), (1, 1, 69.0)]


def test_the_longest_and_shortest_steps_are_left_out_of_the_means() -> None:
    lengths = [1.0] * 8 + [50.0]
    steps = parts_of([sample(0, n, None, step_s=seconds) for n, seconds in enumerate(lengths, 1)], 1)
    means = middle_half(steps)
    assert sum(means.values()) == pytest.approx(1.0)


def test_the_slowest_rank_is_named_with_the_share_of_its_steps() -> None:
    samples = [
        sample(rank, step, ready_at_s=10.0 + (rank == (0 if step == 3 else 1)))
        for step in range(1, 5)
        for rank in range(2)
    ]
    assert slowest_rank(parts_of(samples, 2)) == (1, 0.75)


def test_nobody_waits_for_a_single_rank() -> None:
    assert slowest_rank(parts_of([sample(0, step, ready_at_s=10.0) for step in range(1, 5)], 1)) is None
