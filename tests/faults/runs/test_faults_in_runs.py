"""A rank that fails in the middle of a step ends the run on all, is named, and leaves the ranks in good
order."""

from __future__ import annotations

import json
from pathlib import Path

import faults
import pytest
from faults import ENDLESS
from rows import Measured, row

import nbgpu


@row(
    "one rank raises in a step of a run",
    "the run fails with its cause; the sum is right, variables are kept, the next run trains",
    bound_s=1,
)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_in_a_step(
    cluster2: nbgpu.Cluster, measured: Measured, tmp_path: Path, bad: int
) -> None:
    cluster2.execute(f"kept = 3 + rank\n{faults.in_training(bad, step=4, action='raise')}")
    run = cluster2.train("autoencoder", **ENDLESS, runs_dir=str(tmp_path))
    with pytest.raises(nbgpu.RankError) as caught:
        run.wait(400)
    measured.ended(str(caught.value))
    assert [(f.rank, f.error_type, f.message) for f in caught.value.failures] == [
        (bad, "ValueError", "on purpose")
    ]
    assert run.status == "failed"
    # Each rank's last collectives are there to be compared.
    for rank in (0, 1):
        told = json.loads((run.folder / f"flight-rank{rank}.json").read_text())
        assert "gloo:all_reduce" in {entry["profiling_name"] for entry in told["entries"]}
    # The ranks are in good order: the sum is right, variables are kept, and the next run trains.
    told = cluster2.execute(
        f"{faults.MEND}\ntotal = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
    )
    assert told == {0: "2 3\n", 1: "2 4\n"}
    settings = {**ENDLESS, "steps": 3}
    assert cluster2.train("autoencoder", **settings, runs_dir=str(tmp_path)).wait(400).status == "finished"
