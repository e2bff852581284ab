"""How the lines of several ranks become one text."""

from __future__ import annotations

import random

from nbgpu.client.cells.merging import DISPLAY_HOLD_S, HOLD_S, Block, Item, Merger
from nbgpu.text.ranks import rank_ranges


def out(*texts: str) -> list[Item]:
    return [("stdout", text) for text in texts]


def told(blocks: list[Block]) -> list[tuple[str, str]]:
    return [(rank_ranges(block.ranks), " ".join(block.texts)) for block in blocks]


def merged(*said: list[Item]) -> list[Block]:
    """All at once, of ranks that have ended."""
    merger = Merger(range(len(said)))
    for rank, items in enumerate(said):
        merger.add(rank, items, 0.0)
        merger.end(rank)
    return merger.take(0.0)


def test_what_all_say_is_shown_once_and_what_differs_by_rank() -> None:
    assert told(merged(out("a", "b"), out("a", "b"))) == [("0-1", "a b")]
    blocks = merged(out("begin", "x0", "end"), out("begin", "x1", "end"), out("begin", "x0", "end"))
    assert told(blocks) == [("0-2", "begin"), ("1", "x1"), ("0,2", "x0"), ("0-2", "end")]


def test_what_differs_stands_in_blocks() -> None:
    blocks = merged(out("a0", "b0", "c0"), out("a1", "b1", "c1"))
    assert told(blocks) == [("0", "a0 b0 c0"), ("1", "a1 b1 c1")]


def test_opposite_orders_end() -> None:
    assert told(merged(out("a", "b"), out("b", "a"))) == [("0", "a"), ("0-1", "b"), ("1", "a")]


def test_stdout_and_stderr_are_told_apart() -> None:
    blocks = merged([("stdout", "a"), ("stderr", "a")], [("stdout", "a")])
    assert [(block.ranks, block.kind) for block in blocks] == [((0, 1), "stdout"), ((0,), "stderr")]


def test_a_line_waits_for_the_others_and_not_for_long() -> None:
    merger = Merger([0, 1])
    merger.add(0, out("same", "own"), 10.0)
    assert merger.take(10.1) == []
    merger.add(1, out("same"), 10.15)
    assert told(merger.take(10.2)) == [("0-1", "same")]
    assert merger.take(10.2) == []
    assert told(merger.take(10.0 + HOLD_S)) == [("0", "own")]


def test_pictures_stand_in_the_order_of_the_ranks_whoever_ends_first() -> None:
    picture0, picture1 = ("display_data", "picture 0"), ("display_data", "picture 1")
    merger = Merger([0, 1, 2])
    merger.add(1, [*out("drawn"), picture1], 10.0)
    merger.end(1)
    assert merger.take(10.0 + HOLD_S) == []
    # Rank 0 draws more slowly, and rank 2 goes on without a picture.
    merger.add(0, [picture0], 10.0 + 0.9 * DISPLAY_HOLD_S)
    assert merger.take(10.0 + 0.95 * DISPLAY_HOLD_S) == []
    shown = [("0", "picture 0"), ("1", "drawn"), ("1", "picture 1")]
    assert told(merger.take(10.0 + DISPLAY_HOLD_S)) == shown
    merger.add(0, [picture0], 30.0)
    merger.end(2)
    assert told(merger.take(30.0)) == [("0", "picture 0")]


def test_a_rank_that_goes_on_is_shown_live() -> None:
    merger = Merger([0, 1])
    merger.add(1, [("display_data", "curve"), *out("step 1")], 10.0)
    assert told(merger.take(10.0 + HOLD_S)) == [("1", "curve"), ("1", "step 1")]


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    merger = Merger([0, 1, 2])
    merger.end(1)
    merger.add(0, out("a"), 0.0)
    merger.add(2, out("a"), 0.0)
    assert told(merger.take(0.0)) == [("0,2", "a")]
    merger.end(2)
    merger.add(0, out("b"), 0.0)
    assert told(merger.take(0.0)) == [("0", "b")]


def test_no_line_is_lost_and_each_ranks_order_is_kept_whatever_they_say() -> None:
    chance = random.Random(7)
    for _ in range(300):
        num_ranks = chance.choice([1, 2, 3, 8])
        said: dict[int, list[Item]] = {rank: [] for rank in range(num_ranks)}
        merger = Merger(said)
        blocks: list[Block] = []
        now_s = 0.0
        for _ in range(chance.randrange(30)):
            rank = chance.randrange(num_ranks)
            kind = chance.choice(["stdout", "stderr", "display_data"])
            items = [(kind, chance.choice("abcdefg")) for _ in range(chance.randrange(4))]
            said[rank] += items
            merger.add(rank, items, now_s)
            now_s += chance.choice([0.0, 0.1, 0.3])
            if chance.random() < 0.5:
                blocks += merger.take(now_s)
        blocks += merger.take(now_s + 2 * DISPLAY_HOLD_S)
        for rank, items in said.items():
            shown = [(b.kind, text) for b in blocks if rank in b.ranks for text in b.texts]
            assert shown == items
