"""A cell for which nobody waits (`Cluster.submit`): its ranks are freed as in any other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import faults
import pytest
from rows import Measured, row

import nbgpu

TOTAL = "total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
WELL = {0: "2 0\n", 1: "2 7\n"}
PATIENCE_S = 15


@pytest.fixture
def cluster(cluster2: nbgpu.Cluster) -> Iterator[nbgpu.Cluster]:
    cluster2.execute("kept = 7 * rank")
    pids = dict(cluster2.pids)
    yield cluster2
    assert cluster2.execute(TOTAL) == WELL
    assert cluster2.pids == pids, "a rank was replaced"
    cluster2.parts.state.news.clear()


@row(
    "a submitted cell waits in a barrier, and {fault}",
    "all are back, with nobody waiting for them; the sum is right, variables are kept",
    bound_s=2,
)
@pytest.mark.parametrize("fault", ["a rank raises", "the ranks are interrupted", "the cell is stopped"])
def test_its_ranks_are_freed(cluster: nbgpu.Cluster, measured: Measured, fault: str) -> None:
    code = "print('begun', flush=True)\nif rank == 0: dist.barrier()\nelse: import time; time.sleep(60)"
    if fault == "a rank raises":
        code = f"{faults.at(1, 'raise')}\ndist.barrier()"
    results = cluster.submit(code)
    if fault != "a rank raises":
        give_up_s = time.monotonic() + PATIENCE_S
        while not all(result.stdout for result in results.values()):
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        measured.fault_now()
        if fault == "the cell is stopped":
            cluster.stop_cell()
        else:
            cluster.ranks.interrupt(results)
    assert all(result.wait(PATIENCE_S) for result in results.values())
    measured.ended(str(results[1].exception()))
    assert type(results[0].exception()).__name__ == "RemoteError"
