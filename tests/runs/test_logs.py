"""What a run writes for other tools: metrics.csv, epochs.jsonl, TensorBoard's files and W&B's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import faults
import pandas as pd
import pytest
from conftest import SUPPORT

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.ui.run.stored import StoredRun

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 8,
    "val_every": 4,
    "threads": 1,
}


@pytest.fixture(scope="module")
def run(cluster2: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One with every log on: 3 steps an epoch."""
    return cluster2.train(
        "autoencoder",
        **SMALL,
        runs_dir=str(tmp_path_factory.mktemp("logs")),
        tensorboard=True,
        histograms_every=4,
        wandb="offline",
        wandb_project="volumes",
        wandb_name="first try",
    ).wait(400)


def epochs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]


def _read_wandb(path: Path) -> dict[str, Any]:
    # In a process of its own: W&B makes temporary folders when it is imported.
    command = [sys.executable, str(SUPPORT / "wandb_file.py"), str(path)]
    read: dict[str, Any] = json.loads(subprocess.check_output(command, text=True))
    return read


def test_no_log_complains(run: Run) -> None:
    assert run.status == "finished"
    assert run.notes() == []


def test_the_table_has_every_step_of_every_rank_once(run: Run) -> None:
    table = pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")
    assert list(zip(table["step"], table["rank"], strict=True)) == [
        (s, r) for s in range(1, 9) for r in (0, 1)
    ]
    steps_per_epoch = run.info.steps_per_epoch
    assert list(table["epoch"]) == [(step - 1) // steps_per_epoch + 1 for step in table["step"]]
    recorded = run.metrics().dropna(subset=["loss"]).sort_values(["step", "rank"])
    for name in ("loss", "grad_norm", "lr", "step_s", "samples_per_s"):
        assert list(table[name]) == list(recorded[name])
    # The validation of a step stands in its row on rank 0.
    validated = table.dropna(subset=["val_loss"])
    assert list(zip(validated["step"], validated["rank"], strict=True)) == [(4, 0), (8, 0)]
    assert table["memory_rss_bytes"].notna().all()


def test_each_epoch_is_summed_up(run: Run) -> None:
    table = pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")
    told = epochs(run.folder)
    steps_per_epoch = run.info.steps_per_epoch
    num_epochs = -(-8 // steps_per_epoch)
    assert [e["epoch"] for e in told] == list(range(1, num_epochs + 1))
    assert [e["complete"] for e in told] == [e * steps_per_epoch <= 8 for e in range(1, num_epochs + 1)]
    for epoch in told:
        rows = table[table["epoch"] == epoch["epoch"]]
        assert epoch["means"]["loss"] == pytest.approx(rows["loss"].mean())
        assert epoch["train_s"] == pytest.approx(rows.groupby("step")["step_s"].max().sum())
        assert epoch["samples"] == 4 * rows["step"].nunique()
        assert epoch["samples_per_s"] == pytest.approx(epoch["samples"] / epoch["train_s"])
        own_s = rows.groupby("rank")["compute_s"].mean()
        assert epoch["slowest_rank"] == own_s.idxmax()
        assert epoch["straggler_ratio"] == pytest.approx(own_s.max() / own_s.min())
    assert told[-1]["validation"]["loss"] == table["val_loss"].iloc[-2]


def test_tensorboard_reads_scalars_and_histograms(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard"), {"histograms": 0})
    events.Reload()
    table = pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")
    losses = events.Scalars("train/loss")
    assert [e.step for e in losses] == list(range(1, 9))
    assert [e.value for e in losses] == pytest.approx(list(table.groupby("step")["loss"].mean()))
    assert [e.value for e in events.Scalars("train/lr")] == pytest.approx(list(table["lr"][::2]))
    assert [e.step for e in events.Scalars("val/loss")] == [4, 8]
    assert len(events.Scalars("rank1/samples_per_s")) == 8
    assert len(events.Scalars("epoch/straggler_ratio")) == len(epochs(run.folder))
    (settings,) = events.Tensors("settings/text_summary")
    assert b"batch_size = 2" in settings.tensor_proto.string_val[0]
    names = events.Tags()["histograms"]
    weights, gradients = ({n for n in names if n.startswith(kind)} for kind in ("weights/", "gradients/"))
    assert {n.removeprefix("weights/") for n in weights} == {n.removeprefix("gradients/") for n in gradients}
    assert len(weights) > 10
    some = events.Histograms(sorted(gradients)[0])
    assert [h.step for h in some] == [4, 8]
    assert any(h.histogram_value.max > h.histogram_value.min for h in some)


def test_wandb_has_settings_and_steps_offline(run: Run) -> None:
    (path,) = (run.folder / "wandb").glob("offline-run-*/*.wandb")
    written = _read_wandb(path)
    assert (written["id"], written["project"], written["name"]) == (run.folder.name, "volumes", "first try")
    assert written["config"]["batch_size"] == 2
    assert [step["_step"] for step in written["history"]] == list(range(1, 9))
    table = pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")
    losses = [step["train/loss"] for step in written["history"]]
    assert losses == pytest.approx(list(table.groupby("step")["loss"].mean()))
    assert written["history"][0]["_timestamp"] == pytest.approx(table["time_s"].iloc[0], abs=0.01)
    assert written["ended"]


def test_nothing_of_the_logs_stays_in_the_engines(cluster2: nbgpu.Cluster, run: Run) -> None:
    told = cluster2.execute(
        "import threading, psutil\n"
        "print([t.name for t in threading.enumerate() if 'log-files' in t.name or 'Event' in t.name or 'Otel' in t.name],"
        " psutil.Process().children())"
    )
    assert told == {0: "[] []\n", 1: "[] []\n"}


def test_logs_that_are_off_leave_nothing(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    plain = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400)
    assert (plain.folder / "metrics.csv").exists()
    assert not {"tensorboard", "wandb", "profile"} & {path.name for path in plain.folder.iterdir()}
    silent = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path), telemetry=False).wait(400)
    assert not {"metrics.csv", "epochs.jsonl"} & {path.name for path in silent.folder.iterdir()}


def test_a_run_that_fails_has_all_that_was_recorded(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute(faults.in_training(1, step=6, action="raise"))
    try:
        failing = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path))
        with pytest.raises(nbgpu.RankError, match="on purpose"):
            failing.wait(400)
    finally:
        cluster2.execute(faults.MEND)
    table = pd.read_csv(failing.folder / "metrics.csv", float_precision="round_trip")
    recorded = failing.metrics().dropna(subset=["loss"])
    assert set(zip(table["step"], table["rank"], strict=True)) == set(
        zip(recorded["step"], recorded["rank"], strict=True)
    )
    assert len(table) == len(recorded) >= 8
    assert epochs(failing.folder)[-1]["last_step"] == table["step"].max()
    stored = StoredRun(failing.folder)
    assert stored.status == "failed"
    assert (stored.failures[0].rank, stored.failures[0].message) == (1, "on purpose")


def test_a_log_that_cannot_be_written_costs_only_itself(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path), tensorboard=True)
    # In the way of what is made when the first step is recorded.
    (run.folder / "tensorboard").write_text("")
    (run.folder / "epochs.jsonl").mkdir()
    run.wait(400)
    assert run.status == "finished"
    notes = "\n".join(run.notes())
    assert "epochs.jsonl is not written any more" in notes
    assert "TensorBoard's log is not written any more" in notes
    assert len(pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")) == 16


def test_packages_that_are_not_installed_are_named_before_anything_starts(tmp_path: Path) -> None:
    """An environment that has all packages but these two."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.split("-")[0] not in ("wandb", "tensorboard") and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-m",
            "nbgpu.cli",
            "train",
            "autoencoder",
            "--tensorboard",
            "--wandb",
            "offline",
        ],
        env={**os.environ, "PYTHONPATH": f"{Path(nbgpu.__file__).parents[1]}:{packages}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 1
    assert "packages tensorboard and wandb are not installed here" in done.stderr
    assert "pip install 'nbgpu[tensorboard,wandb]'" in done.stderr
    assert not (tmp_path / "nbgpu_runs").exists()
