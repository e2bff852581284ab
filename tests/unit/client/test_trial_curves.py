"""The curves of a sweep's trial, by which the best trial is chosen."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.client.sweeps.trial import Trial
from nbgpu.config import ClusterConfig, train_config
from nbgpu.machine.devices import cpu
from nbgpu.protocol.records import RunInfo
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import names
from nbgpu.run_folder.reader import Reader
from nbgpu.run_folder.recorder import Recorder
from nbgpu.run_folder.settling import SettledConfig


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(0, {}, train_config("autoencoder"), tmp_path, "val_loss", "min")


@pytest.fixture
def info(trial: Trial) -> RunInfo:
    """What is known of the trial's run, which has two ranks and a folder."""
    run_folder = runs.create(SettledConfig(trial.config), ClusterConfig(gpus="none"))
    info = RunInfo(
        run_id=run_folder.name,
        recipe="autoencoder",
        devices=(cpu(0), cpu(1)),
        backend="gloo",
        total_steps=4,
        steps_per_epoch=2,
        batch_size=1,
        global_batch_size=2,
        started_s=time.time(),
    )
    (run_folder / names.INFO).write_text(json.dumps(info.to_json()))
    return info


def _record(trial: Trial, info: RunInfo, *losses: tuple[int, int, float]) -> None:
    """Record (rank, step, loss), in this order."""
    recorders = [Recorder(trial.folder / info.run_id, rank) for rank in (0, 1)]
    for rank, step, loss in losses:
        recorders[rank].sample(step, loss=loss)
    for recorder in recorders:
        recorder.close()


def _points(trial: Trial) -> list[tuple[int, float]]:
    curve = trial.curve("loss")
    return list(zip(curve.steps, curve.values, strict=True))


def test_steps_that_a_run_has_done_again_replace_those_before(trial: Trial, info: RunInfo) -> None:
    """Rank 1 is lost in step 3: rank 0 has recorded it, and both go back to step 1."""
    again = [(rank, step, 3.0 + step + rank) for step in (2, 3, 4) for rank in (0, 1)]
    _record(trial, info, (0, 1, 1.0), (1, 1, 3.0), (0, 2, 1.0), (1, 2, 3.0), (0, 3, 9.0), *again)
    trial.read_earlier_runs()
    assert _points(trial) == [(1, 2.0), (2, 5.5), (3, 6.5), (4, 7.5)]


def test_a_curve_goes_on_with_the_ranks_that_a_lost_host_has_left(trial: Trial, info: RunInfo) -> None:
    run: Any = SimpleNamespace(folder=trial.folder / info.run_id, info=info, status="running")
    _record(trial, info, (0, 1, 1.0), (1, 1, 3.0), (0, 2, 9.0))
    run.reader = Reader(run.folder, 2, live=False)
    trial.begin_run(run)
    assert _points(trial) == [(1, 2.0)]
    # Rank 1 is lost in step 2, which rank 0 does again.
    _record(trial, info, (0, 2, 5.0), (0, 3, 4.0))
    run.info = replace(info, devices=(cpu(0),))
    run.reader = Reader(run.folder, 2, live=False)
    run.reader.keep_only(1)
    assert _points(trial) == [(1, 2.0), (2, 5.0), (3, 4.0)]
