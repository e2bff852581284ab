"""A run's logs when the rank that keeps them dies: no gap and no double."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import faults
import launching
import leaks
import pandas as pd
import psutil
import pytest
from conftest import SUPPORT

import nbgpu

SETTINGS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 40,
    "val_every": 10,
    "threads": 1,
    "tensorboard": True,
    "histograms_every": 0,
    "wandb": "offline",
}


@pytest.mark.long
def test_logs_go_on_where_the_rank_that_died_had_got_to(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with (
        nbgpu.Cluster(**launching.settings()) as cluster,
        leaks.holding_family_of(psutil.Process(cluster.pids[0]).ppid()),
    ):
        # Late enough for some of it to be in the logs already, which are written once a second.
        cluster.execute(
            "import time\n"
            + faults.in_training(0, step=30, action="kill")
            + "\n_in_time = Autoencoder.loss\n"
            + "def slow(self, model, batch):\n"
            + "    time.sleep(0.1)\n"
            + "    return _in_time(self, model, batch)\n"
            + "Autoencoder.loss = slow"
        )
        run = cluster.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path)).wait(400)
        cluster.execute("if '_in_time' in globals(): Autoencoder.loss = _in_time")
    assert run.status == "finished"
    assert all("rank 0 was killed by SIGKILL" in note for note in run.notes())
    table = pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")
    recorded = run.metrics().dropna(subset=["loss"]).sort_values(["step", "rank"])
    # What the killed rank had not written when it died is all that is missing.
    assert list(zip(table["step"], table["rank"], strict=True)) == list(
        zip(recorded["step"], recorded["rank"], strict=True)
    )
    assert list(table["loss"]) == list(recorded["loss"])
    assert set(table["step"]) == set(range(1, 41))
    assert list(table["step"][table["val_loss"].notna()]) == [10, 20, 30, 40]

    told = [json.loads(line) for line in (run.folder / "epochs.jsonl").read_text().splitlines()]
    assert [epoch["epoch"] for epoch in told] == list(range(1, len(told) + 1))
    assert told[-1]["last_step"] == 40
    for before, after in itertools.pairwise(told):
        assert after["first_step"] == before["last_step"] + 1

    assert len(list((run.folder / "tensorboard").iterdir())) == 2
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 41))
    assert [event.step for event in events.Scalars("epoch/number")] == [epoch["last_step"] for epoch in told]

    logged: set[int] = set()
    for path in (run.folder / "wandb").glob("offline-run-*/*.wandb"):
        command = [sys.executable, str(SUPPORT / "wandb_file.py"), str(path)]
        written = json.loads(subprocess.check_output(command, text=True))
        assert written["id"] == run.folder.name
        logged |= {step["_step"] for step in written["history"]}
    assert logged == set(range(1, 41))
