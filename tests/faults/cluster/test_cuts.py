"""The ranks are cut off from a group that is given up, and never from the one after it."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator

import faults
import pytest
from rows import Measured, row

import nbgpu
from nbgpu.protocol.records import GivenUp

NUM_STOPS = 25
NUM_LATE = 200
TOTAL = "total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
WELL = {0: "2 0\n", 1: "2 7\n"}
BARRIERS = "for _ in range(10**6): dist.barrier()"


@pytest.fixture(autouse=True)
def ranks_are_well_afterwards(cluster2: nbgpu.Cluster) -> Iterator[None]:
    cluster2.execute("kept = 7 * rank")
    yield
    assert cluster2.execute(TOTAL) == WELL
    cluster2.parts.state.news.clear()


def give_up(cluster: nbgpu.Cluster, generation: int, *ranks: int) -> None:
    """Tells ranks, as the client does, that a generation is given up."""
    folder = cluster.parts.state.connection_file.parents[2]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for rank in ranks:
            sender.sendto(str(generation).encode(), str(folder / GivenUp.socket_name(cluster.pids[rank])))


@row(
    "the ranks are told twice within a moment that they are to be freed, and a cell fails later",
    "the failure is named, all are back, the sum is right, variables are kept; so with each failure after it",
    bound_s=1,
)
def test_a_group_that_is_given_up_twice_is_formed_again(cluster2: nbgpu.Cluster, measured: Measured) -> None:
    for _ in range(3):
        # The second one comes while the sentinel is still at the first.
        cluster2.ranks.sever()
        cluster2.ranks.sever()
        with pytest.raises(nbgpu.RankError, match="rank 0: ValueError: on purpose"):
            cluster2.execute(f"{faults.at(0, 'raise')}\n{BARRIERS}")
        measured.ended("ValueError: on purpose")
        assert cluster2.parts.state.news == []
        assert cluster2.execute(TOTAL) == WELL


@pytest.fixture
def heeded() -> Iterator[None]:
    """A shell that puts a process into the background has it ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@row(
    "Stop comes at the moment at which a rank raises, or while the group is formed again after that",
    "the cell ends, all are back, the sum of the next cell is right, variables are kept",
    bound_s=None,
)
@pytest.mark.usefixtures("heeded")
# An interrupt may come between psutil's opening of a file and its closing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_beside_a_failure(cluster2: nbgpu.Cluster) -> None:
    chance = random.Random(0)
    fails = "import time\nbegan = time.monotonic()\nwhile rank or time.monotonic() < began + 0.03: dist.barrier()\n1 / 0"
    for _ in range(NUM_STOPS):
        stop = threading.Timer(chance.uniform(0.02, 0.2), os.kill, (os.getpid(), signal.SIGINT))
        stop.start()
        try:
            with pytest.raises(nbgpu.RankError, match="ZeroDivisionError"):
                cluster2.execute(fails)
            stop.join()
            time.sleep(0.05)  # within the block that awaits the interrupt
        except KeyboardInterrupt:
            pass
        stop.join()
        assert cluster2.execute(TOTAL) == WELL
        cluster2.parts.state.news.clear()


def test_a_group_whose_forming_was_stopped_is_formed_by_the_next_cell(cluster2: nbgpu.Cluster) -> None:
    """Stopped between two ranks, the first would wait for the second, which was never called."""
    called = cluster2.ranks.call

    def call_only_one(function: str, *args: object, with_spec: bool = False) -> dict[int, object]:
        called(function, *args, ranks=[0], with_spec=with_spec)
        raise KeyboardInterrupt

    cluster2.ranks.call = call_only_one  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster2.ranks.regroup()
    finally:
        cluster2.ranks.call = called  # type: ignore[method-assign]
    assert cluster2.execute(TOTAL) == WELL


def test_what_is_said_late_of_a_group_leaves_the_next_one_alone(cluster2: nbgpu.Cluster) -> None:
    cluster2.ranks.regroup()
    generation = cluster2.ranks.assignment.generation
    results = cluster2.submit("for _ in range(3000): dist.all_reduce(torch.ones(10))")
    for _ in range(NUM_LATE):
        give_up(cluster2, generation - 1, 0, 1)
        time.sleep(0.001)
    for result in results.values():
        assert result.wait(400)
        assert result.exception() is None
    assert cluster2.ranks.group_is_whole


def test_what_is_said_early_of_a_group_ends_it_before_any_rank_waits(cluster2: nbgpu.Cluster) -> None:
    """A rank may hear that a generation is given up before it was asked to form it; it must not begin
    then."""
    give_up(cluster2, cluster2.ranks.assignment.generation + 1, 0)
    cluster2.ranks.regroup()
    assert cluster2.execute(TOTAL) == WELL


def test_a_rank_that_makes_a_group_meanwhile_does_not_wait_in_it(cluster2: nbgpu.Cluster) -> None:
    """The connections of that group are not known yet when the others are cut."""
    for _ in range(10):
        with pytest.raises(nbgpu.RankError, match="rank 0: ZeroDivisionError"):
            cluster2.execute(
                "own = dist.new_group([0, 1])\nif rank == 0: 1 / 0\nwhile True: dist.barrier(dist.new_group([0, 1]))"
            )
        assert cluster2.execute(TOTAL) == WELL
        cluster2.parts.state.news.clear()
