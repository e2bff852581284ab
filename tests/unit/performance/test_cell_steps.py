"""What the ranks did in a cell, from what each noted."""

from __future__ import annotations

from typing import Any

from nbgpu.performance.cell_steps import cell_as_steps
from nbgpu.performance.clocks import ClockComparison, Clocks
from nbgpu.performance.rank_steps import RankStep, blocked_spans, critical_path


def collective(
    operation: str, number: int, came_s: float, arrived_s: float | None, **also: Any
) -> dict[str, Any]:
    return {
        "operation": operation,
        "key": f"{operation} {number}",
        "num_bytes": 8,
        "came_s": came_s,
        "arrived_s": arrived_s,
        "since_s": None,
        "until_s": None,
        "has_failed": False,
        **also,
    }


def waited(operation: str, number: int, came_s: float, since_s: float, until_s: float) -> dict[str, Any]:
    return collective(operation, number, came_s, until_s, since_s=since_s, until_s=until_s)


def notes(marks: list[tuple[str, float]], ended_s: float, *collectives: dict[str, Any]) -> dict[str, Any]:
    return {
        "ended_s": ended_s,
        "marks": marks,
        "num_marks": len(marks),
        "collectives": list(collectives),
        "num_collectives": len(collectives),
    }


def work(rank: RankStep) -> list[tuple[str, float, float]]:
    return [(span.kind, span.begin_s, span.end_s) for span in rank.work]


def path(ranks: list[RankStep]) -> list[tuple[int, str, float, float]]:
    return [(s.rank, s.kind, s.begin_s, s.end_s) for s in critical_path(ranks)]


def test_ddp_waits_for_its_buckets_in_the_backward_pass() -> None:
    def ddp(late_s: float) -> dict[str, Any]:
        marks = [
            ("other", 0.0),
            ("forward", 1.0),
            ("backward", 2.0 + late_s),
            ("optimizer", 7.0),
            ("other", 8.0),
        ]
        buckets = [
            collective("all_reduce", 1, 3.0 + late_s, 5.0),
            collective("all_reduce", 2, 4.0 + late_s, 6.0),
        ]
        return notes(marks, 9.0, *buckets)

    ranks = cell_as_steps(3, {0: ddp(0.0), 1: ddp(1.0)}, Clocks())
    assert work(ranks[0]) == [
        ("other", 0, 1),
        ("forward", 1, 2),
        ("backward", 2, 4),
        ("other", 6, 7),
        ("optimizer", 7, 8),
        ("other", 8, 9),
    ]
    assert [(s.kind, s.name, s.begin_s, s.end_s) for s in ranks[0].sent] == [
        ("exchange", "all_reduce", 3, 5),
        ("exchange", "all_reduce", 4, 6),
    ]
    assert [(s.rank, s.kind, s.begin_s, s.end_s) for s in blocked_spans(ranks)] == [
        (0, "waiting", 4, 5),
        (0, "transfer", 5, 6),
        (1, "transfer", 5, 6),
    ]
    assert path(ranks) == [
        (1, "other", 0, 1),
        (1, "forward", 1, 3),
        (1, "backward", 3, 5),
        (0, "transfer", 5, 6),
        (0, "other", 6, 7),
        (0, "optimizer", 7, 8),
        (0, "other", 8, 9),
    ]


def test_a_rank_that_gave_its_data_early_computes_until_it_waits() -> None:
    early = notes([("other", 0.0)], 10.0, waited("all_reduce", 1, came_s=1, since_s=5, until_s=8))
    late = notes([("other", 0.0)], 9.0, waited("all_reduce", 1, came_s=7, since_s=7, until_s=8))
    ranks = cell_as_steps(1, {0: early, 1: late}, Clocks())
    assert [(s.rank, s.kind, s.begin_s, s.end_s) for s in blocked_spans(ranks)] == [
        (0, "waiting", 5, 7),
        (0, "transfer", 7, 8),
        (1, "transfer", 7, 8),
    ]
    assert path(ranks) == [(1, "other", 0, 7), (0, "transfer", 7, 8), (0, "other", 8, 10)]


def test_a_path_does_not_go_back_in_time_where_two_were_on_their_way() -> None:
    own = notes([("other", 0.0)], 10.0, waited("all_reduce", 1, 1, 5, 6), waited("all_reduce", 2, 2, 6, 8))
    ranks = cell_as_steps(1, {0: own, 1: own}, Clocks())
    found = path(ranks)
    assert found == [(0, "other", 0, 2), (0, "transfer", 2, 8), (0, "other", 8, 10)]


def test_what_cannot_be_compared_is_neither_waiting_nor_transfer() -> None:
    # The root of the broadcast goes on at once, and rank 0 waits in a second collective that failed.
    failed = {**waited("all_reduce", 2, 5, 5, 9), "has_failed": True}
    first = notes([("other", 0.0)], 10.0, waited("broadcast", 1, 1, 1, 2), failed)
    second = notes([("other", 0.0)], 5.0, waited("broadcast", 1, 4, 4, 4.5))
    ranks = cell_as_steps(1, {0: first, 1: second}, Clocks())
    assert list(blocked_spans(ranks)) == []
    assert work(ranks[0]) == [
        ("other", 0, 1),
        ("blocked", 1, 2),
        ("other", 2, 5),
        ("blocked", 5, 9),
        ("other", 9, 10),
    ]
    assert work(ranks[1]) == [("other", 0, 4), ("blocked", 4, 4.5), ("other", 4.5, 5)]


def test_ranks_in_other_orders_or_with_early_results_are_not_compared() -> None:
    first = notes([("other", 0.0)], 9.0, waited("all_reduce", 1, 1, 1, 2), waited("barrier", 2, 3, 3, 4))
    second = notes([("other", 0.0)], 9.0, waited("barrier", 2, 1, 1, 4), waited("all_reduce", 1, 5, 5, 6))
    assert all(rank.blocked == () for rank in cell_as_steps(1, {0: first, 1: second}, Clocks()))
    later = notes([("other", 0.0)], 9.0, waited("all_reduce", 1, 3, 3, 4))
    early = notes([("other", 0.0)], 9.0, waited("all_reduce", 1, 1, 1, 2))
    assert all(rank.blocked == () for rank in cell_as_steps(1, {0: early, 1: later}, Clocks()))


def test_what_one_rank_has_forgotten_is_shown_of_none() -> None:
    both = [waited("all_reduce", 1, 1, 1, 2), waited("all_reduce", 2, 3, 3, 4)]
    whole = notes([("other", 0.0)], 5.0, *both)
    part = {**notes([("other", 0.0)], 5.0, both[1]), "num_collectives": 2}
    ranks = cell_as_steps(1, {0: whole, 1: part}, Clocks())
    assert [rank.begin_s for rank in ranks] == [4, 4]
    assert [len(rank.blocked) for rank in ranks] == [1, 1]


def test_clocks_are_brought_together() -> None:
    own = notes([("other", 0.0)], 5.0, waited("barrier", 1, 1, 1, 2))
    ahead = notes([("other", 100.0)], 105.0, waited("barrier", 1, 101, 101, 102))
    ranks = cell_as_steps(1, {0: own, 1: ahead}, Clocks([ClockComparison(0.0, [0.0, -100.0], [0.0, 0.001])]))
    assert work(ranks[0]) == work(ranks[1])
    assert [len(rank.blocked) for rank in ranks] == [1, 1]


def test_a_cell_that_did_nothing_has_a_moment() -> None:
    (rank,) = cell_as_steps(1, {0: notes([("other", 3.0)], 3.0)}, Clocks())
    assert work(rank) == [("other", 3, 3)]
