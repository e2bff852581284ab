"""Sweeps on real ranks: side by side, with trials that fail and die, stopped, killed, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pandas as pd
import pytest

import nbgpu
from nbgpu.client.cluster.lifecycle import Lifecycle
from nbgpu.client.host import registry
from nbgpu.client.sweeps.sweep import Sweep
from nbgpu.planning import trials
from nbgpu.run_folder import checkpoint_files, names, resume
from nbgpu.ui.sweep import view as sweep_view

pytestmark = pytest.mark.one_host("each trial of a sweep has a cluster of its own here")

SMALL: dict[str, Any] = {
    "gpus": "none",
    "patch_size": 16,
    "threads": 1,
    "val_every": 5,
}


def wait_until(
    what: Callable[[], Any], of: subprocess.Popen[str] | nbgpu.Sweep, timeout_s: float = 200
) -> Any:
    """Waits for what a sweep does. Fails at once where the sweep is over, and says what it told."""
    give_up_s = time.monotonic() + timeout_s
    while not (found := what()):
        over = of.poll() is not None if isinstance(of, subprocess.Popen) else of.over
        if over or time.monotonic() > give_up_s:
            if found := what():  # it happened just before the end
                return found
            pytest.fail(
                f"{'the sweep is over' if over else f'after {timeout_s:g} s'}, and it did not happen\n{_told(of)}"
            )
        time.sleep(0.05)
    return found


def _told(sweep: subprocess.Popen[str] | nbgpu.Sweep) -> str:
    if not isinstance(sweep, subprocess.Popen):
        return sweep.table().to_string()
    if sweep.poll() is None:
        sweep.send_signal(signal.SIGINT)  # it then says how far its trials have come
    try:
        out, errors = sweep.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        sweep.kill()
        out, errors = sweep.communicate()
    return f"it ended with {sweep.returncode}\n{out}\n{errors}"


def write_volumes(folder: Path, whole: bool) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for name in "abcdef":
        path = folder / f"{name}.nii.gz"
        nib.save(nib.Nifti1Image(rng.random((24, 24, 24), dtype=np.float32), np.eye(4)), path)
        if not whole:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def engine_of(run_folder: Path) -> int:
    """The process that trains a run."""
    (entry,) = [entry for entry in registry.entries() if entry.run == run_folder]
    return entry.engines[0].pid


@pytest.mark.release
@pytest.mark.long
def test_a_failed_trial_takes_no_other_with_it_and_is_tried_again(tmp_path: Path) -> None:
    volumes = tmp_path / "volumes"
    write_volumes(volumes, whole=False)
    settings = {**SMALL, "steps": 40, "runs_dir": str(tmp_path / "runs"), "checkpoint_every": 10}
    # With the network left out, choosing it would meet the bad file before there is a run.
    settings |= {"channels": (8, 16), "latent_channels": 2}
    sweep = nbgpu.sweep("autoencoder", data=[str(volumes), "phantoms"], seed=[0, 1], **settings)
    assert sweep.status == "running"
    # The clusters of its trials are nobody's current one.
    with pytest.raises(nbgpu.NoClusterError):
        nbgpu.current()
    with pytest.raises(nbgpu.RunError, match=rf"is running in process {os.getpid()}"):
        nbgpu.sweep(resume=sweep.folder)
    killed = sweep.trials[2]
    wait_until(
        lambda: checkpoint_files.checkpoints(killed.run_folders[0]) if killed.run_folders else [], of=sweep
    )
    os.kill(engine_of(killed.run_folders[0]), signal.SIGKILL)
    sweep.wait(400)

    assert sweep.status == "finished"
    assert [trial.state for trial in sweep.trials] == ["failed", "failed", "failed", "finished"]
    assert sweep.best is sweep.trials[3]
    assert sweep.best.checkpoint().name == "step-00000040"
    assert f"{volumes}/a.nii.gz" in str(sweep.trials[0].error)
    assert [f.error_type for f in sweep.trials[0].failures()] == ["DataError"]
    assert "was killed by SIGKILL" in str(killed.error)
    table = pd.read_csv(sweep.folder / "table.csv", float_precision="round_trip")
    assert list(table["state"]) == ["finished", "failed", "failed", "failed"]
    assert {"data", "seed", "best val_loss", "at step", "loss", "error", "folder"} <= set(table.columns)
    measured = sweep.trials[3].metrics()["val_loss"].dropna()
    assert len(measured) == 8
    assert table["best val_loss"][0] == measured.min() == sweep.table()["best val_loss"].iloc[0]
    for shown in (
        (sweep.folder / "report.html").read_text(),
        sweep_view.page(sweep, sweep_view.svg(sweep)),
        sweep_view.text(sweep),
    ):
        assert "DataError" in shown
        assert "was killed by SIGKILL" in shown
    assert sweep_view.svg(sweep).startswith("<svg")

    write_volumes(volumes, whole=True)
    again = nbgpu.sweep(resume=sweep.folder, parallel=3).wait(400)
    assert [trial.state for trial in again.trials] == ["finished"] * 4
    assert [len(trial.run_folders) for trial in again.trials] == [2, 2, 2, 1]
    went_on = again.trials[2]
    assert resume.Beginning.read(went_on.run_folders[1]).step >= 10
    # What was done again counts once.
    assert list(went_on.metrics()["step"][went_on.metrics()["loss"].notna()]) == list(range(1, 41))


def test_every_trial_must_fit_the_checkpoint_with_which_all_begin(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    settings = {**SMALL, "data": "phantoms", "num_phantoms": 8, "runs_dir": str(tmp_path)}
    settings |= {"channels": (8, 16), "latent_channels": 2}
    del settings["gpus"]
    run = cluster2.train("autoencoder", **settings, steps=4, checkpoint_every=4).wait(300)
    begins = settings | {"gpus": "none", "ranks": 2, "resume": str(run.folder)}
    with pytest.raises(
        nbgpu.ConfigError,
        match=r"1 of 2 trials cannot run, and none was started:\n.*\nsteps=2: all 4 steps are done",
    ):
        nbgpu.sweep("autoencoder", **begins, steps=[8, 2])
    assert [path.name for path in tmp_path.iterdir() if "sweep" in path.name] == []


def test_a_damaged_trial_does_not_leave_the_folder_locked(tmp_path: Path) -> None:
    plan = trials.plan("autoencoder", {"data": "phantoms", "lr": [1e-4, 1e-3], "runs_dir": str(tmp_path)})
    folder = trials.create_folder(plan)
    run = folder / "trial-000" / "20260101-000000-autoencoder-0000"
    run.mkdir(parents=True)
    (run / names.SETTINGS).touch()
    (run / names.INFO).write_text("[]")
    for _ in range(2):
        with pytest.raises(nbgpu.RunError) as refused:
            Sweep(folder, plan, [])
        assert "is running in process" not in str(refused.value)


_FLAGS = [
    part
    for name, value in (
        SMALL | {"data": "phantoms", "steps": 300, "checkpoint_every": 20, "val_every": 50}
    ).items()
    for part in (f"--{name.replace('_', '-')}", str(value))
]


def _hear_interrupts() -> None:
    """A shell has what it starts in the background ignore them, and so would the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def start_sweep(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nbgpu.cli", "sweep", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=_hear_interrupts, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def steps_saved(folder: Path) -> list[int]:
    """The newest checkpoint of each run in a trial's folder, in the order of the runs."""
    runs = sorted(folder.glob("*/run.toml"), key=lambda path: path.stat().st_mtime_ns)
    newest = [checkpoint_files.checkpoints(path.parent)[:1] for path in runs]
    return [int(found[0].name.removeprefix("step-")) if found else 0 for found in newest]


@pytest.mark.long
def test_a_sweep_goes_on_after_ctrl_c_and_after_it_was_killed(tmp_path: Path) -> None:
    with start_sweep("autoencoder", *_FLAGS, "--lr", "1e-3,1e-2", "--runs-dir", str(tmp_path)) as process:
        (folder,) = wait_until(lambda: list(tmp_path.glob("*-sweep-autoencoder-*")), of=process)
        both = [folder / f"trial-00{number}" for number in (0, 1)]
        wait_until(lambda: all(any(steps_saved(trial)) for trial in both), of=process)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=360)
    assert process.returncode == 1, errors
    assert "stopping all runs" in told
    assert told.count("stopped") >= 2
    assert not registry.entries()
    stopped = [steps_saved(trial)[0] for trial in both]
    assert all(0 < step < 300 for step in stopped)

    with start_sweep("--resume", str(folder)) as process:
        wait_until(
            lambda: all(len(steps_saved(trial)) == 2 and steps_saved(trial)[1] for trial in both), of=process
        )
    killed = [steps_saved(trial)[1] for trial in both]
    assert all(before < after for before, after in zip(stopped, killed, strict=True))

    with start_sweep("--resume", str(folder)) as process:
        told, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "2 of 2 trials finished" in told
    for trial in both:
        # One that had got to its end when the sweep was killed is not begun again.
        assert max(steps_saved(trial)) == 300
    table = pd.read_csv(folder / "table.csv")
    assert list(table["state"]) == ["finished"] * 2
    assert list(table["step"]) == [300] * 2
    assert sorted(table["lr"]) == [1e-3, 1e-2]


def test_a_sweep_that_cannot_get_engines_says_so_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('this torch is broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sweep = nbgpu.sweep("autoencoder", seed=[0, 1], runs_dir=str(tmp_path / "runs"), **SMALL)
    with pytest.raises(nbgpu.ClusterError, match="broken on purpose"):
        sweep.wait(400)
    assert sweep.status == "failed"
    assert [trial.state for trial in sweep.trials] == ["waiting", "waiting"]


@pytest.mark.long
def test_a_trial_whose_engines_do_not_start_is_trained_where_engines_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other place is done with its own trial long before, and waits for what becomes of this start."""
    start, first = Lifecycle.start, threading.Event()

    def fails_once(lifecycle: Lifecycle, *args: Any, **settings: Any) -> None:
        if not first.is_set():
            first.set()
            wait_until(lambda: any(trial.over for trial in sweep.trials))
            time.sleep(1)
            raise nbgpu.ClusterError("broken on purpose")
        start(lifecycle, *args, **settings)

    monkeypatch.setattr(Lifecycle, "start", fails_once)
    sweep = nbgpu.sweep(
        "autoencoder", seed=[0, 1], parallel=2, steps=3, runs_dir=str(tmp_path / "runs"), **SMALL
    )
    assert sweep.wait(400).status == "finished"
    assert [trial.state for trial in sweep.trials] == ["finished"] * 2


def test_a_start_that_fails_outside_of_the_engines_loses_no_trial_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    sweep = nbgpu.sweep("autoencoder", seed=[0, 1], runs_dir=str(tmp_path / "runs"), **SMALL)
    with pytest.raises(
        nbgpu.ClusterError, match=r"engines could not be started: FileNotFoundError.*not there"
    ):
        sweep.wait(400)
    assert sweep.status == "failed"
    assert [trial.state for trial in sweep.trials] == ["waiting", "waiting"]


def test_bad_values_start_nothing_and_leave_no_folder(tmp_path: Path) -> None:
    command = ["autoencoder", "--lr", "1e-3,50", "--batch-size", "0,2", "--runs-dir", str(tmp_path)]
    with start_sweep(*command) as process:
        _, errors = process.communicate(timeout=360)
    assert process.returncode == 1
    assert "3 of 4 trials cannot run" in errors
    assert "lr=50 (2 trials): lr = '50' is not valid" in errors
    assert "batch_size=0 (2 trials): batch_size = '0' is not valid" in errors
    assert not list(tmp_path.iterdir())
