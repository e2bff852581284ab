"""What cells draw: other numbers on each rank, and with a seed the same ones at every start."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import nbgpu

DRAW = """
import random
import numpy as np
drawn = [torch.rand(3).tolist(), float(np.random.rand()), random.random()]
"""
Drawn = list[list[float] | float]


def drawn(cluster: nbgpu.Cluster) -> list[Drawn]:
    """What each rank draws next, from torch, NumPy and Python."""
    cluster.execute(DRAW)
    by_rank = cluster.pull("drawn", ranks="all")
    return [by_rank[rank] for rank in sorted(by_rank)]


@pytest.mark.long
def test_each_rank_draws_its_own_numbers_and_a_seed_repeats_them(tmp_path: Path) -> None:
    with nbgpu.Cluster(gpus="none", ranks=2, cell_seed=5, spare=1) as cluster:
        first, second = drawn(cluster)
        assert all(ours != theirs for ours, theirs in zip(first, second, strict=True))
        # The spare that takes over rank 1 begins with the numbers of rank 1.
        os.kill(cluster.pids[1], signal.SIGKILL)
        # Its end is known before the cell is sent, or found in it.
        with pytest.raises(nbgpu.NbgpuError, match="rank 1"):
            cluster.execute("dist.barrier()")
        later, again = drawn(cluster)
        assert again == second
        assert later != first
        cluster.restart()
        assert drawn(cluster) == [first, second]
        # A run draws by its own seed, and leaves the cells' numbers as they were.
        settings = {"data": "phantoms", "patch_size": 16, "num_phantoms": 8, "val_every": 0}
        cluster.train("autoencoder", steps=2, runs_dir=str(tmp_path), **settings).wait(400)
        assert drawn(cluster)[0] == later


def test_with_no_seed_the_ranks_draw_different_numbers(cluster2: nbgpu.Cluster) -> None:
    on_0, on_1 = drawn(cluster2)
    assert all(ours != theirs for ours, theirs in zip(on_0, on_1, strict=True))
