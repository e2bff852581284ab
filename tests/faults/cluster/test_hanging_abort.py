"""NCCL's abort may wait for ever for a GPU, or for a rank, that is lost. It alone is a stand-in here."""

from __future__ import annotations

import faults
import pytest
from rows import Measured, row

import nbgpu

ABORT_THAT_HANGS = """
from nbgpu.engine.group import group, torch_private
if rank == 0:
    import time
    torch_private.abort_nccl = lambda groups: time.sleep(3600)
    group._ABORT_PATIENCE_S = 0.3
kept = 7
"""


@pytest.mark.long
@row(
    "a rank raises, and NCCL cannot be aborted on a rank that waits for it",
    "the failure is named, and so is the rank that ended; it is replaced, the sum is right, the others keep variables",
    bound_s=None,
)
def test_the_rank_is_given_up_and_replaced(measured: Measured) -> None:
    with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
        cluster.execute(ABORT_THAT_HANGS)
        pids = dict(cluster.pids)
        # gloo frees rank 0 at once, where NCCL would hold it until the abort.
        wait = "import time\ntry: dist.barrier()\nfinally: time.sleep(5)"
        with pytest.raises(nbgpu.RankError) as failed:
            cluster.execute(f"{faults.at(1, 'raise')}\n{wait}")
        measured.ended(str(failed.value))
        reasons = {failure.rank: failure.message for failure in failed.value.failures}
        assert reasons[0] == "rank 0 ended itself, because NCCL could not be aborted on its GPU"
        assert "on purpose" in reasons[1]
        assert any("rank 0 was replaced and is empty" in line for line in cluster.parts.state.news)
        cluster.parts.state.news.clear()
        said = cluster.execute(
            "total = torch.ones(1); dist.all_reduce(total); print(int(total), 'kept' in globals())"
        )
        assert said == {0: "2 False\n", 1: "2 True\n"}
        assert cluster.pids[1] == pids[1]
        assert cluster.pids[0] != pids[0]
