"""What the ranks did in a step, and the path that took its time."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.performance.rank_steps import RankStep, blocked_spans, critical_path, from_moments, from_parts


def moments(forward_s: float, arrived_s: float) -> dict[str, Any]:
    """A step from 100 on: 1 s of data, the forward pass, and 3 s of backward pass with two buckets, the last
    of which arrives at 100 + arrived_s; then 0.5 s of optimizer."""
    computed_s = 101 + forward_s + 3
    arrived_s += 100
    marks = [["data", 100], ["agreement", 101], ["forward", 101], ["backward", 101 + forward_s]]
    marks += [["beside", arrived_s], ["waiting", arrived_s], ["optimizer", arrived_s]]
    marks += [["other", arrived_s + 0.5]]
    return {"marks": marks, "sent": [[computed_s - 2, computed_s - 1, 800], [computed_s, arrived_s, 400]]}


def two_ranks() -> list[RankStep]:
    """Rank 1 has its gradients at 107, a second after rank 0, and the transfer then takes half a second on
    rank 0 and a quarter on rank 1."""
    ranks = [from_moments(7, 0, moments(2.0, 7.5)), from_moments(7, 1, moments(3.0, 7.25))]
    assert ranks[0] is not None
    assert ranks[1] is not None
    return [ranks[0], ranks[1]]


def test_a_rank_computes_until_its_last_bucket_is_ready() -> None:
    rank = two_ranks()[0]
    assert [(s.kind, s.begin_s, s.end_s) for s in rank.work if s.end_s > s.begin_s] == [
        ("data", 100, 101),
        ("forward", 101, 103),
        ("backward", 103, 106),
        ("optimizer", 107.5, 108),
    ]
    assert [(s.begin_s, s.end_s, s.num_bytes) for s in rank.sent] == [(104, 105, 800), (106, 107.5, 400)]
    assert (rank.begin_s, rank.end_s) == (100, 108)


def test_a_rank_waits_for_the_last_one_and_then_for_the_transfer() -> None:
    found = [(s.rank, s.kind, s.begin_s, s.end_s) for s in blocked_spans(two_ranks())]
    assert found == [
        (0, "waiting", 106, 107),
        (0, "transfer", 107, 107.5),
        (1, "transfer", 107, 107.25),
    ]


def test_the_path_ends_on_the_rank_with_which_the_next_one_begins() -> None:
    path = critical_path(two_ranks(), ends_on=1)
    assert [(s.rank, s.kind, s.begin_s, s.end_s) for s in path if s.end_s > s.begin_s][-2:] == [
        (1, "transfer", 107, 107.25),
        (1, "optimizer", 107.25, 107.75),
    ]


def test_the_path_jumps_to_the_rank_that_was_waited_for() -> None:
    path = critical_path(two_ranks())
    assert [(s.rank, s.kind, s.begin_s, s.end_s) for s in path if s.end_s > s.begin_s] == [
        (1, "data", 100, 101),
        (1, "forward", 101, 104),
        (1, "backward", 104, 107),
        (0, "transfer", 107, 107.5),
        (0, "optimizer", 107.5, 108),
    ]


def test_the_path_passes_every_exchange_of_a_step() -> None:
    """A discriminator's gradients are exchanged after the model's, and another rank may be last there."""
    steps = []
    for rank, model_s, discriminator_s in ((0, 3.0, 6.5), (1, 4.0, 6.0)):
        marks = [["forward", 0.0], ["backward", 1.0], ["beside", 5.0], ["optimizer", 5.5], ["other", 9.0]]
        found = from_moments(
            1, rank, {"marks": marks, "sent": [[model_s, 5.0, 1], [discriminator_s, 7.0, 1]]}
        )
        assert found is not None
        steps.append(found)
    path = [(s.rank, s.kind) for s in critical_path(steps) if s.end_s > s.begin_s]
    assert path == [
        (1, "forward"),
        (1, "backward"),
        (0, "transfer"),
        (0, "backward"),
        (0, "optimizer"),
        (0, "transfer"),
        (0, "optimizer"),
    ]


def test_a_single_rank_waits_for_nobody() -> None:
    marks = [["data", 0.0], ["forward", 1.0], ["backward", 2.0], ["optimizer", 4.0], ["other", 5.0]]
    rank = from_moments(1, 0, {"marks": marks, "sent": []})
    assert rank is not None
    assert list(blocked_spans([rank])) == []
    assert [s.kind for s in critical_path([rank])] == ["data", "forward", "backward", "optimizer"]


def test_a_step_is_drawn_from_its_parts_where_its_moments_are_not_known() -> None:
    values = {"begun_at_s": 100.0, "step_s": 8.2, "data_s": 1.0, "forward_s": 2.0, "backward_s": 3.0}
    values |= {"ready_at_s": 106.5, "exposed_s": 1.0, "optimizer_s": 0.5}
    rank = from_parts(7, 1, values, shift_s=1.0)
    assert rank is not None
    drawn = [(s.kind, round(s.begin_s, 6), round(s.end_s, 6)) for s in rank.work]
    assert drawn == [
        ("data", 101.0, 102.0),
        ("other", 102.0, 102.5),
        ("forward", 102.5, 104.5),
        ("backward", 104.5, 107.5),
        ("optimizer", 108.5, 109.0),
        ("other", 109.0, 109.2),
    ]
    assert (rank.blocked[0].ready_s, rank.blocked[0].arrived_s, rank.sent) == (107.5, 108.5, ())
    assert from_parts(7, 1, {"step_s": 1.0}) is None


@pytest.mark.parametrize(
    "detail",
    [
        {},
        {"marks": [["data", 1.0]], "sent": []},
        {"marks": [["data", 2.0], ["other", 1.0]], "sent": []},
        {"marks": [["data", 1.0], ["other", "2"]], "sent": []},
        {"marks": [["data", 1.0], ["other", 2.0]], "sent": [[2.0, 1.0, 5]]},
        {"marks": [["data", 1.0], ["other", float("nan")]], "sent": []},
    ],
)
def test_a_damaged_event_gives_no_step(detail: dict[str, Any]) -> None:
    assert from_moments(1, 0, detail) is None
