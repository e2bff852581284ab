"""The profiler's window in real runs: the trace files, and where the time went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import faults
import pytest

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.protocol.records import Event

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 8,
    "val_every": 0,
    "threads": 1,
    "profile": "3:6",
}
PARTS = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "other_s")


def profiles(run: Run) -> dict[int, Event]:
    records, _ = run.reader.since()
    return {r.rank: r for r in records if isinstance(r, Event) and r.kind == "profile"}


@pytest.mark.long
def test_every_rank_writes_a_trace_and_says_where_its_time_went(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    run = cluster2.train("autoencoder", **SMALL, accumulate=2, runs_dir=str(tmp_path)).wait(400)
    told = profiles(run)
    assert set(told) == {0, 1}
    for rank, event in told.items():
        assert event.step == 6
        assert event.text.startswith("steps 3 to 6, ")
        assert sum(event.detail[part] for part in PARTS) == pytest.approx(event.detail["step_s"])
        assert all(event.detail[part] > 0 for part in PARTS)
        assert event.detail["hidden_s"] > 0
        with gzip.open(run.folder / event.detail["trace"], "rt") as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
        assert names.count("nbgpu.step") == 4
        assert names.count("nbgpu.backward") == 8
        # The agreement of each step, and its gradients.
        assert names.count("gloo:all_reduce") >= 8


@pytest.mark.long
def test_a_rank_that_waits_for_a_slow_one_spends_its_time_in_communication(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    cluster2.execute(
        "import time\n"
        "from nbgpu.recipes.autoencoder.recipe import Autoencoder\n"
        "_loss = Autoencoder.loss\n"
        "def slow(self, model, batch):\n"
        "    time.sleep(1.0 * rank)\n"
        "    return _loss(self, model, batch)\n"
        "Autoencoder.loss = slow"
    )
    try:
        run = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400)
    finally:
        cluster2.execute("Autoencoder.loss = _loss")
    told = profiles(run)
    assert told[0].detail["communication_s"] > 0.5
    assert told[1].detail["forward_s"] > 1.0
    assert told[1].detail["communication_s"] < told[0].detail["communication_s"] / 2


def test_a_window_beyond_the_end_is_dropped_and_the_next_run_profiles(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    settings = {**SMALL, "steps": 4, "epochs": 1, "profile": "2:40", "runs_dir": str(tmp_path)}
    run = cluster2.train("autoencoder", **settings).wait(400)
    assert not profiles(run)
    num_steps = run.statuses()[0].step
    assert f"the profile of steps 2 to 40 was cut off after step {num_steps}" in run.notes()
    again = cluster2.train("autoencoder", **{**settings, "profile": "2:3"}).wait(400)
    assert set(profiles(again)) == {0, 1}


@pytest.mark.long
def test_a_window_that_a_failure_cuts_off_is_dropped_and_the_next_run_profiles(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    cluster2.execute(faults.in_training(1, step=4, action="raise"))
    try:
        run = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path))
        with pytest.raises(nbgpu.RankError, match="on purpose"):
            run.wait(400)
    finally:
        cluster2.execute(faults.MEND)
    assert not profiles(run)
    assert any("was cut off at step 4" in note for note in run.notes())
    again = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400)
    assert set(profiles(again)) == {0, 1}
