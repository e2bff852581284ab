"""Ranks that a simulated link holds back are freed as fast as ranks that wait in a real collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import nbgpu

HANG_S = 300
"""A collective takes 2000 s on this link."""
KEPT = "print(kept)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from conftest import what_changes_of

    with (
        nbgpu.Cluster(gpus="none", ranks=2, link="1Gbit/s,1000s") as cluster,
        what_changes_of(cluster),
    ):
        cluster.execute("kept = 10 + rank\nones = torch.ones(3)")
        yield cluster


@pytest.fixture
def stopped() -> Iterator[threading.Timer]:
    """Presses Stop when started, a moment later."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    yield timer
    timer.cancel()
    timer.join()
    signal.signal(signal.SIGINT, before)


WAITS = {
    "at once": "dist.all_reduce(ones)",
    "later": "work = dist.all_reduce(ones, async_op=True); work.wait()",
    "for a future": "work = dist.all_reduce(ones, async_op=True); work.get_future().wait()",
}


@pytest.mark.parametrize("how", WAITS)
def test_a_rank_that_raises_frees_one_that_is_held_back(cluster: Any, how: str) -> None:
    begun_s = time.monotonic()
    code = (
        f"if rank == 1:\n    dist.all_reduce(ones, async_op=True)\n    raise KeyError('mine')\n{WAITS[how]}"
    )
    with pytest.raises(nbgpu.RankError, match="mine") as caught:
        cluster.execute(code)
    assert time.monotonic() - begun_s < HANG_S
    assert caught.value.failures[0].rank == 1
    assert cluster.execute(KEPT) == {0: "10\n", 1: "11\n"}


def test_a_rank_in_a_backward_pass_is_freed(cluster: Any) -> None:
    # DDP's constructor would broadcast the parameters over the link. A bias-free Linear has no buffers.
    cluster.execute(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(3, 1, bias=False), init_sync=False)"
    )
    begun_s = time.monotonic()
    code = (
        "loss = model(ones).sum()\n"
        "if rank == 1:\n    dist.all_reduce(ones, async_op=True)\n    1 / 0\n"
        "loss.backward()"
    )
    with pytest.raises(nbgpu.RankError, match="division by zero"):
        cluster.execute(code)
    assert time.monotonic() - begun_s < HANG_S
    assert cluster.execute(KEPT) == {0: "10\n", 1: "11\n"}
    cluster.execute("del model, loss")


def test_stop_frees_all_ranks(cluster: Any, stopped: threading.Timer) -> None:
    stopped.start()
    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cluster.execute("dist.all_reduce(ones)")
    assert time.monotonic() - begun_s < HANG_S
    assert cluster.execute(KEPT) == {0: "10\n", 1: "11\n"}


def test_a_message_that_is_held_back_is_given_up(cluster: Any, stopped: threading.Timer) -> None:
    stopped.start()
    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cluster.execute("dist.send(ones, 1) if rank == 0 else dist.recv(ones, 0)")
    assert time.monotonic() - begun_s < HANG_S
    assert cluster.execute(KEPT) == {0: "10\n", 1: "11\n"}


def test_the_notice_says_where_they_wait(cluster: Any, stopped: threading.Timer) -> None:
    stopped.start()
    seen: list[str] = []
    look = threading.Timer(0.5, lambda: seen.append(str(cluster.status())))
    look.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.execute("dist.all_reduce(ones)")
    look.join()
    assert seen[0].count("in all_reduce over the simulated link 1Gbit/s, 1000s") == 2
    assert "2 CPU ranks, gloo, simulated link 1Gbit/s, 1000s" in seen[0]


def test_a_rank_that_dies_is_replaced(cluster: Any) -> None:
    kill = threading.Timer(1.0, os.kill, (cluster.pids[1], signal.SIGKILL))
    kill.start()
    begun_s = time.monotonic()
    with pytest.raises(nbgpu.RankError, match="rank 1"):
        cluster.execute("dist.all_reduce(ones)")
    kill.join()
    assert time.monotonic() - begun_s < HANG_S
    assert cluster.execute(KEPT, ranks=[0]) == {0: "10\n"}
    assert cluster.execute("print(rank)") == {0: "0\n", 1: "1\n"}
