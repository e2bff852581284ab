"""Sixteen CPU ranks, many more than cores: all is slower, and nothing is taken for stuck that only waits for
its turn."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nbgpu

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NUM_RANKS = 16
TOTAL = "total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
ALL_OF_THEM = {rank: f"{NUM_RANKS} {rank}\n" for rank in range(NUM_RANKS)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbgpu.Cluster]:
    with nbgpu.Cluster(gpus="none", ranks=NUM_RANKS) as started:
        started.execute("kept = rank")
        yield started


@pytest.fixture
def stop_after() -> Iterator[Callable[[float], None]]:
    """Presses Stop in this process after so many seconds."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timers: list[threading.Timer] = []

    def start(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[0].start()

    yield start
    timers[0].join()
    signal.signal(signal.SIGINT, before)


def test_a_collective_takes_all_of_them(cluster: nbgpu.Cluster) -> None:
    for _ in range(3):
        assert cluster.execute(TOTAL) == ALL_OF_THEM


def test_one_that_raises_frees_fifteen(cluster: nbgpu.Cluster) -> None:
    with pytest.raises(nbgpu.RankError) as caught:
        cluster.execute("if rank == 15: raise ValueError('on purpose')\ndist.all_reduce(torch.ones(10))")
    assert [failure.rank for failure in caught.value.failures] == [15]
    assert cluster.execute(TOTAL) == ALL_OF_THEM


# Here the client looks at its processes all the time: Ctrl-C falls between the opening of a file in /proc and
# its `with`, too, and Python then closes the file by itself, with this warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "code", ["while True: dist.all_reduce(torch.ones(10**5))", "import time; time.sleep(600)"]
)
def test_stop_brings_all_back(cluster: nbgpu.Cluster, stop_after: Callable[[float], None], code: str) -> None:
    stop_after(3)
    with pytest.raises(KeyboardInterrupt):
        cluster.execute(code)
    assert cluster.execute(TOTAL) == ALL_OF_THEM


def test_values_come_from_all_of_them(cluster: nbgpu.Cluster) -> None:
    cluster.execute("x = torch.full((10**6,), float(rank))")
    assert {rank: int(x[-1]) for rank, x in cluster.pull("x", ranks="all").items()} == {
        rank: rank for rank in range(NUM_RANKS)
    }


def test_they_train(cluster: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster.train(
        "autoencoder",
        data="phantoms",
        patch_size=16,
        num_phantoms=64,
        batch_size=1,
        steps=3,
        val_every=0,
        threads=1,
        runs_dir=str(tmp_path),
    ).wait()
    assert run.status == "finished"
    assert cluster.execute(TOTAL) == ALL_OF_THEM
