"""Training runs on real ranks: the three ways to start one, the person's commands, and what is recorded."""

from __future__ import annotations

import csv
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import psutil
import pytest

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.protocol.records import Event, Sample
from nbgpu.run_folder.reader import Reader

EPOCHS_OF_4_STEPS: dict[str, Any] = {
    "data": "phantoms",
    "num_phantoms": 20,
    "patch_size": 16,
    "channels": (4, 8),
    "batch_size": 2,
    "threads": 1,
}
"""Sixteen phantoms to train on, in batches of four over two ranks."""

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 32,
    "batch_size": 2,
    "steps": 6,
    "val_every": 3,
    "threads": 1,
}


def losses(folder: Path) -> dict[tuple[int, int], float]:
    """Every loss in a run's folder, by rank and step."""
    records, _ = Reader(folder, world_size=2, live=False).since()
    return {
        (r.rank, r.step): r.values["loss"] for r in records if isinstance(r, Sample) and "loss" in r.values
    }


def only_run(runs_dir: Path) -> Path:
    (folder,) = runs_dir.iterdir()
    return folder


def states(run: Run) -> list[str]:
    records, _ = run.reader.since()
    return [r.text for r in records if isinstance(r, Event) and r.kind == "state" and r.rank == 0]


def wait_for(run: Run, status: str, timeout_s: float = 90) -> None:
    give_up_s = time.monotonic() + timeout_s
    while run.status != status:
        assert time.monotonic() < give_up_s, f"the run is {run.status} and did not become {status}"
        time.sleep(0.02)


@pytest.mark.long
def test_the_three_ways_give_the_same_losses_to_the_last_bit(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute("torch.manual_seed(123); torch.rand(7)")  # the cells' generators must not matter
    from_notebook = cluster2.train("autoencoder", runs_dir=str(tmp_path / "notebook"), **SMALL).wait(400)

    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "nbgpu.cli", "train", "autoencoder", "--gpus", "none", *flags]
    told = subprocess.run(
        [*command, "--runs-dir", str(tmp_path / "cli")],
        check=True,
        capture_output=True,
        text=True,
        timeout=360,
    ).stdout
    assert from_notebook.info.data
    for sentence in from_notebook.info.data:
        assert told.count(sentence) == 1, told

    toml = tmp_path / "run.toml"
    write_toml(
        toml,
        ClusterConfig(gpus="none"),
        train_config("autoencoder", runs_dir=str(tmp_path / "torchrun"), **SMALL),
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, "-m", "nbgpu.engine.train", str(toml)],
        check=True,
        capture_output=True,
        timeout=360,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # torchrun leaves its logs behind
    )

    expected = losses(from_notebook.folder)
    assert set(expected) == {(rank, step) for rank in (0, 1) for step in range(1, 7)}
    assert losses(only_run(tmp_path / "cli")) == expected
    assert losses(only_run(tmp_path / "torchrun")) == expected
    for folder in (from_notebook.folder, only_run(tmp_path / "cli"), only_run(tmp_path / "torchrun")):
        with (folder / "metrics.csv").open() as file:
            table = {(int(row["rank"]), int(row["step"])): float(row["loss"]) for row in csv.DictReader(file)}
        assert table == expected


def test_a_run_records_itself_in_its_folder(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **SMALL).wait(400)
    assert run.status == "finished"
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700
    assert json.loads((run.folder / "env.json").read_text())["packages"]["torch"]
    assert run.info.steps_per_epoch > 0
    assert run.info.global_batch_size == 4
    assert (run.checkpoint() / "model.safetensors").stat().st_size > 1000
    frame = run.metrics()
    assert set(frame["rank"]) == {0, 1}
    assert {"loss", "lr", "step_s", "grad_norm", "val_loss", "memory_rss_bytes"} <= set(frame.columns)
    assert frame["val_loss"].count() == 2
    result = run.result()
    assert result is not None
    assert "autoencoder" in result["table"]
    assert states(run)[0] == "loading packages"
    assert states(run)[-1] == "finished"
    # The cells have the ranks again.
    assert cluster2.execute("print(world_size)")[1] == "2\n"


def test_show_result_shows_what_result_returns(
    cluster2: nbgpu.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **SMALL)
    with pytest.raises(nbgpu.RunError, match=r"has no result yet: it is .*run\.wait\(\) waits for the end"):
        run.show_result()
    run.wait(400)
    capsys.readouterr()
    run.show_result()  # there is no notebook here, so it prints
    told = capsys.readouterr().out
    result = run.result()
    assert result is not None
    assert result["note"] in told
    assert "trilinear" in told
    assert f"pictures: {', '.join(result['images'])}" in told

    stopped = cluster2.train("autoencoder", runs_dir=str(tmp_path), **{**SMALL, "steps": 100_000})
    wait_for(stopped, "training")
    stopped.stop()
    stopped.wait(400)
    with pytest.raises(nbgpu.RunError, match=r"because it was stopped\. run\.work_out_result\(\) works out"):
        stopped.show_result()
    step = stopped.statuses()[0].step
    assert stopped.work_out_result().wait(400) is stopped
    assert (stopped.status, stopped.info.total_steps) == ("finished", step)
    told = stopped.result()
    assert told is not None
    assert told["weights"].startswith(f"of step {step}")
    assert "trilinear" in (stopped.folder / "report.html").read_text()
    with pytest.raises(nbgpu.RunError, match="has its result"):
        stopped.work_out_result()
    # The ranks' files go on without a gap, and the weights stay those of the checkpoint.
    assert {s.step for s in stopped.statuses()} == {step}
    assert not stopped.notes() or "damage" not in " ".join(stopped.notes())


def test_pause_resume_and_stop_reach_all_ranks_at_the_same_step(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **{**SMALL, "steps": 100_000, "val_every": 0})
    wait_for(run, "training")
    with pytest.raises(nbgpu.RunError, match=r"run\.stop\(\)"):
        cluster2.execute("1")
    run.pause()
    wait_for(run, "paused", timeout_s=10)
    time.sleep(0.3)
    paused_at = [s.step for s in run.statuses()]
    time.sleep(0.5)
    assert [s.step for s in run.statuses()] == paused_at
    assert len(set(paused_at)) == 1
    run.resume()
    wait_for(run, "training", timeout_s=10)
    run.stop()
    run.wait(30)
    assert run.status == "stopped"
    recorded = losses(run.folder)
    assert max(step for rank, step in recorded if rank == 0) == max(
        step for rank, step in recorded if rank == 1
    )
    assert run.checkpoint().name.startswith("step-")
    with pytest.raises(nbgpu.RunError, match="cannot pause"):
        run.pause()


def test_accumulation_equals_one_large_batch(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    """One step of lr 0 changes nothing, so that both see the same weights; the gradients must agree."""
    common = {**SMALL, "steps": 2, "val_every": 0, "clip_norm": 0, "kl_weight": 0, "lr": 1e-12}
    large = cluster2.train("autoencoder", runs_dir=str(tmp_path), **{**common, "batch_size": 4}).wait(400)
    small = cluster2.train(
        "autoencoder", runs_dir=str(tmp_path), **{**common, "batch_size": 2, "accumulate": 2}
    ).wait(400)
    assert small.info.global_batch_size == large.info.global_batch_size == 8
    norms = [run.metrics()["grad_norm"].dropna() for run in (large, small)]
    assert norms[0].iloc[0] == pytest.approx(norms[1].iloc[0], rel=0.2)  # the reparametrization noise differs


@pytest.mark.long
@pytest.mark.parametrize("amp", ["bf16", pytest.param("fp16", marks=pytest.mark.release)])
def test_mixed_precision_trains(cluster2: nbgpu.Cluster, tmp_path: Path, amp: str) -> None:
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **{**SMALL, "amp": amp}).wait(400)
    by_step = run.metrics().groupby("step")["loss"].mean().dropna()
    assert by_step.iloc[-1] < by_step.iloc[0]


def test_telemetry_off_records_nothing(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **SMALL, telemetry=False).wait(400)
    assert run.metrics().empty
    assert run.checkpoint().is_dir()


def test_bad_settings_start_nothing(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    with pytest.raises(nbgpu.ConfigError, match=r"batch_size = 0 .*1 to 4096"):
        cluster2.train("autoencoder", batch_size=0, runs_dir=str(tmp_path))
    with pytest.raises(nbgpu.ConfigError, match="Recipes: autoencoder"):
        cluster2.train("autoencodr")
    assert not list(tmp_path.iterdir())


def test_the_command_line_names_a_bad_value_before_any_engine_starts() -> None:
    command = [sys.executable, "-m", "nbgpu.cli", "train", "autoencoder", "--batch-size", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1
    assert "batch_size = 0 is not valid. Give a value within: 1 to 4096" in done.stderr


def test_a_file_that_is_bad_on_one_rank_ends_the_run_on_all(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "volumes"
    folder.mkdir()
    for name in "abcdef":
        volume = nib.Nifti1Image(rng.random((24, 24, 24), dtype=np.float32), np.eye(4))
        nib.save(volume, folder / f"{name}.nii.gz")
    for name in "abc":
        whole = (folder / f"{name}.nii.gz").read_bytes()
        (folder / f"{name}.nii.gz").write_bytes(whole[: len(whole) // 2])
    # With the network left out, choosing it would meet the files before the run.
    files = {"data": str(folder), "num_phantoms": 512, "channels": (4, 8), "latent_channels": 2}
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **{**SMALL, **files})
    with pytest.raises(nbgpu.RankError) as caught:
        run.wait(400)
    assert run.status == "failed"
    assert [f.error_type for f in caught.value.failures] == ["DataError", "DataError"]
    for name in "abc":
        assert all(str(folder / f"{name}.nii.gz") in f.message for f in caught.value.failures)
    # The group survived it.
    assert cluster2.execute("total = torch.ones(1); dist.all_reduce(total); print(int(total))")[0] == "2\n"


@pytest.mark.one_host("other hosts need an address of the network; tests/launchers looks at it")
def test_during_a_run_too_all_sockets_listen_on_loopback_only(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **{**SMALL, "steps": 100_000, "val_every": 0})
    wait_for(run, "training")
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {
        c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN
    }
    run.stop()
    run.wait(30)
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"epochs": 1, "warmup_steps": 1000},
            r"warmup_steps=1000 is a warm-up of 1000 steps, and the whole run",
        ),
        (
            {"steps": 3, "warmup_epochs": 2.0},
            r"warmup_epochs=2.0 is a warm-up of 8 steps, and the whole run has 3",
        ),
    ],
)
def test_a_warm_up_that_is_longer_than_the_run_is_refused(
    cluster2: nbgpu.Cluster, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    settings = {**EPOCHS_OF_4_STEPS, **settings}
    with pytest.raises(nbgpu.ConfigError, match=said):
        cluster2.plan("autoencoder", **settings)
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **settings)
    with pytest.raises(nbgpu.RankError, match=said):
        run.wait(400)
    assert not list(run.folder.glob("checkpoints/*"))


def test_warm_up_validations_and_discriminator_in_epochs(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster2.train(
        "autoencoder",
        **EPOCHS_OF_4_STEPS,
        epochs=3,
        schedule="constant",
        lr=0.5,
        warmup_epochs=0.5,
        val_every_epochs=2,
        adversarial_weight=0.01,
        adversarial_after_epochs=1.5,
        runs_dir=str(tmp_path),
    ).wait(400)
    table = run.metrics()
    table = table[table["rank"] == 0].set_index("step")
    # Half an epoch of four steps.
    assert list(table["lr"].dropna()[[1, 2, 3, 12]]) == pytest.approx([0.25, 0.5, 0.5, 0.5])
    # After two epochs, and at the end.
    assert list(table["val_loss"].dropna().index) == [8, 12]
    assert table["discriminator_loss"].dropna().index.min() == 7
