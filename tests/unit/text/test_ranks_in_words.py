"""How ranks are named."""

from __future__ import annotations

from nbgpu.text.ranks import count_of_ranks, named_ranks, rank_ranges


def test_one_rank_is_not_ranks() -> None:
    assert [count_of_ranks(number) for number in (1, 2, 1024)] == ["1 rank", "2 ranks", "1024 ranks"]


def test_ranks_by_name() -> None:
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([0, 2]) == "ranks 0, 2"


def test_ranks_as_ranges() -> None:
    assert rank_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert rank_ranges([3]) == "3"
