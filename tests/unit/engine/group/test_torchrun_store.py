"""Ranks that torchrun starts again meet one another, whatever those before them left in torchrun's store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from nbgpu.engine.group.meeting import part_of_this_start

WORLD_SIZE = 4
PATIENCE = timedelta(seconds=60)


@pytest.fixture
def torchruns() -> dist.Store:
    return dist.HashStore()


def _start(
    torchruns: dist.Store, ranks: range, timeout: timedelta = PATIENCE
) -> dict[int, dist.Store | RuntimeError]:
    found: dict[int, dist.Store | RuntimeError] = {}

    def come(rank: int) -> None:
        try:
            found[rank] = part_of_this_start(torchruns, rank, WORLD_SIZE, timeout)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _meet(torchruns: dist.Store) -> dist.Store:
    """Has all ranks meet, each of which finds what every other one writes and nothing else."""
    found = _start(torchruns, range(WORLD_SIZE))
    assert not [each for each in found.values() if isinstance(each, RuntimeError)]
    for rank, part in found.items():
        assert not part.check(["left"])
        part.set(f"address/{rank}", f"of rank {rank}")
    for part in found.values():
        assert [part.get(f"address/{rank}").decode() for rank in found] == [f"of rank {r}" for r in found]
    return found[0]


def test_each_start_meets_apart_from_those_before(torchruns: dist.Store) -> None:
    for _ in range(10):
        _meet(torchruns).set("left", "by an earlier start")


@pytest.mark.parametrize("came", [range(1), range(1, WORLD_SIZE), range(2, WORLD_SIZE), range(2)])
def test_a_start_that_some_ranks_missed_disturbs_no_later_one(torchruns: dist.Store, came: range) -> None:
    found = _start(torchruns, came, timedelta(seconds=0.5))
    assert all(isinstance(each, RuntimeError) for rank, each in found.items() if rank == 0)
    _meet(torchruns)


def test_who_did_not_come_is_named(torchruns: dist.Store) -> None:
    found = _start(torchruns, range(2), timedelta(seconds=0.5))
    assert str(found[0]) == "ranks 2, 3 did not come to torchrun's store within 0.5 s"
    (alone,) = _start(torchruns, range(3, 4), timedelta(seconds=0.5)).values()
    assert str(alone) == "rank 3 found no rank 0 in torchrun's store within 0.5 s"
