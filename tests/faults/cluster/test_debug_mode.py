"""Collectives that do not go together are named by debug mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rows import Measured, row

import nbgpu
from nbgpu.client.cells.cell import DistributedCell

SUM = "one = torch.ones(1)\ndist.all_reduce(one)\nprint(int(one))"

MISMATCHES = {
    "other sizes": (
        "n = 8 if rank == 1 else 4\ndist.all_reduce(torch.ones(n))",
        "ranks 0, 2 called all_reduce of float32[4] at cell line 2, "
        "rank 1 called all_reduce of float32[8] at cell line 2",
    ),
    "other collectives": (
        "if rank == 1:\n    dist.broadcast(torch.ones(2, 2).half(), src=0)\nelse:\n    dist.all_reduce(torch.ones(4))",
        "ranks 0, 2 called all_reduce of float32[4] at cell line 4, "
        "rank 1 called broadcast of float16[2, 2] at cell line 2",
    ),
    "a barrier": (
        "if rank == 1:\n    dist.barrier()\nelse:\n    dist.all_gather_object([0] * 3, rank)",
        "ranks 0, 2 called all_gather_object of int64[1] at cell line 4, rank 1 called barrier at cell line 2",
    ),
}


@pytest.fixture(scope="module")
def debugged() -> Iterator[nbgpu.Cluster]:
    with nbgpu.Cluster(gpus="none", ranks=3, debug=True) as cluster:
        yield cluster


@row(
    "ranks call {mismatch} in one place, with --debug",
    "each rank's call is named; the sum is right",
    bound_s=1,
)
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_mismatch_is_named(debugged: nbgpu.Cluster, measured: Measured, mismatch: str) -> None:
    code, expected = MISMATCHES[mismatch]
    measured.fault_now()
    with pytest.raises(nbgpu.RankError) as caught:
        DistributedCell(debugged.parts.cells, code, None, 60).show_blocking()
    measured.ended(str(caught.value))
    assert str(caught.value) == f"all ranks: CollectiveMismatch: {expected}"
    assert debugged.execute(SUM) == {0: "3\n", 1: "3\n", 2: "3\n"}


def test_a_failure_in_debug_mode_frees_the_others(debugged: nbgpu.Cluster) -> None:
    code = "if rank == 2: raise ValueError('on purpose')\ndist.all_reduce(torch.ones(4))"
    with pytest.raises(nbgpu.RankError, match=r"^rank 2: ValueError: on purpose$"):
        DistributedCell(debugged.parts.cells, code, None, 60).show_blocking()
    assert debugged.execute(SUM) == {0: "3\n", 1: "3\n", 2: "3\n"}


@pytest.mark.long
def test_a_run_trains_in_debug_mode(debugged: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {"data": "phantoms", "num_phantoms": 16, "patch_size": 16, "batch_size": 1, "val_every": 2}
    run = debugged.train("autoencoder", steps=4, runs_dir=str(tmp_path), **settings)
    assert run.wait(400).status == "finished"
