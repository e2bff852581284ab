"""The times of collectives on a simulated link, and the queue that delivers them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbgpu.engine.group.simulated_link import Operation, seconds
from nbgpu.engine.group.simulated_queue import Arrivals, Line
from nbgpu.machine.links import Link

LINK = Link("tried", 0.001, 1e6, "a test")


@pytest.mark.parametrize(
    ("operation", "num_bytes", "world_size", "expected_s"),
    [
        # The ring of 2: two latencies, and each byte once.
        ("all_reduce", 1e6, 2, 0.002 + 1.0),
        # Large: the ring of 4 sends 6 messages and 1.5 times the bytes. Small: a tree sends 4.
        ("all_reduce", 1e6, 4, 0.006 + 1.5),
        ("all_reduce", 4, 4, 0.004 + 8e-6),
        ("all_reduce", 4, 64, 0.012 + 8e-6),
        ("all_gather", 1e6, 4, 0.003 + 0.75),
        ("reduce_scatter", 1e6, 4, 0.003 + 0.75),
        ("all_to_all", 1e6, 4, 0.003 + 0.75),
        ("broadcast", 1e6, 4, 0.002 + 1.0),
        ("reduce", 1e6, 5, 0.003 + 1.0),
        ("gather", 1e6, 4, 0.001 + 0.75),
        ("scatter", 1e6, 4, 0.001 + 0.75),
        ("barrier", 0, 8, 0.006),
        ("send", 1e6, 2, 1.001),
        ("all_reduce", 1e6, 1, 0.0),
    ],
)
def test_times_follow_ring_and_tree(
    operation: Operation, num_bytes: float, world_size: int, expected_s: float
) -> None:
    assert seconds(operation, num_bytes, world_size, LINK) == pytest.approx(expected_s)


def test_both_phases_of_a_ring_are_an_all_reduce() -> None:
    for world_size in (2, 3, 8):
        halves_s = seconds("reduce_scatter", 1e7, world_size, LINK) + seconds(
            "all_gather", 1e7, world_size, LINK
        )
        assert seconds("all_reduce", 1e7, world_size, LINK) == pytest.approx(halves_s)


def test_a_line_carries_one_thing_after_the_other_in_each_direction() -> None:
    line = Line()
    assert line.reserve(10.0, 2.0, "out", "in") == 12.0
    assert line.reserve(11.0, 2.0, "out", "in") == 14.0
    assert line.reserve(20.0, 2.0, "out") == 22.0
    assert line.reserve(20.0, 3.0, "in") == 23.0
    assert line.reserve(20.0, 1.0, "out", "in") == 24.0


def test_ranks_read_when_the_others_came(tmp_path: Path) -> None:
    ranks = [Arrivals(tmp_path / "arrivals", rank, 2) for rank in range(2)]
    ranks[0].note(1, 5.0)
    assert ranks[0].last_s(1) == 5.0
    ranks[1].note(1, 7.0)
    assert [rank.last_s(1) for rank in ranks] == [7.0, 7.0]
    # What a rank did long ago is not taken for a newer collective.
    ranks[0].note(1025, 9.0)
    assert ranks[0].last_s(1025) == 9.0
    assert (tmp_path / "arrivals").stat().st_mode & 0o077 == 0
