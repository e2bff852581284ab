"""The curves of a sweep's trial, by which the best trial is chosen."""

from __future__ import annotations

import json
import time
from pathlib import Path

from nbgpu.client.sweeps.trial import Trial
from nbgpu.config import ClusterConfig, train_config
from nbgpu.machine.devices import cpu
from nbgpu.protocol.records import RunInfo
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import names
from nbgpu.run_folder.recorder import Recorder
from nbgpu.run_folder.settling import SettledConfig


def test_steps_that_a_run_has_done_again_replace_those_before(tmp_path: Path) -> None:
    """Rank 1 is lost in step 3: rank 0 has recorded it, and both go back to step 1."""
    trial = Trial(0, {}, train_config("autoencoder"), tmp_path, "val_loss", "min")
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
    recorders = [Recorder(run_folder, rank) for rank in (0, 1)]
    for rank, step, loss in ((0, 1, 1.0), (1, 1, 3.0), (0, 2, 1.0), (1, 2, 3.0), (0, 3, 9.0)):
        recorders[rank].sample(step, loss=loss)
    for step in (2, 3, 4):
        for rank, recorder in enumerate(recorders):
            recorder.sample(step, loss=3.0 + step + rank)
    for recorder in recorders:
        recorder.close()
    trial.read_finished()
    curve = trial.curve("loss")
    assert list(zip(curve.steps, curve.values, strict=True)) == [(1, 2.0), (2, 5.5), (3, 6.5), (4, 7.5)]
