"""A rank that is killed while it trains ends the run at once, with its signal."""

from __future__ import annotations

from pathlib import Path

import faults
import pytest
from rows import Measured, row
from test_faults_in_runs import ENDLESS

import nbgpu
from nbgpu.client.cells import DistributedCell


@row("a rank is ended by SIGKILL, in a run", "the rank is named with its signal", bound_s=0.5)
def test_a_rank_that_is_killed_in_a_step(measured: Measured, tmp_path: Path) -> None:
    with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
        cluster.execute(f"kept = 5\n{faults.in_training(1, step=4, action='kill')}")
        run = cluster.train("autoencoder", **ENDLESS, runs_dir=str(tmp_path))
        with pytest.raises(nbgpu.RankError, match="rank 1 was killed by SIGKILL") as caught:
            run.wait(90)
        measured.ended(str(caught.value))
        assert len(caught.value.failures) == 1
        assert cluster.pull("kept", rank=0) == 5
        with pytest.raises(nbgpu.ClusterError, match="rank 1 was killed by SIGKILL"):
            cluster.execute("1")


def test_an_abort_by_gloo_says_how_to_find_out_what_did_not_fit() -> None:
    with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
        cell = DistributedCell(cluster, "dist.all_reduce(torch.ones(4 + 40 * rank))", None, 60)
        with pytest.raises(nbgpu.RankError, match=r"was killed by SIGABRT.*%nbgpu start --debug names"):
            cell.show_blocking()
