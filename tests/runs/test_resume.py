"""Going on from a checkpoint on real ranks: to the last bit, past a damaged one, and on a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from rows import row

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.protocol.records import Event, Sample
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder.reader import Reader

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 30,  # 4 steps an epoch
    "steps": 10,
    "checkpoint_every": 5,
    "val_every": 4,
    "threads": 1,
}


def numbers(run: Run, from_step: int) -> pd.DataFrame:
    """What the ranks computed after a step, without what they measured."""
    frame = run.metrics()
    columns = ["rank", "step", "loss", "recon_loss", "kl_loss", "grad_norm", "lr", "val_loss", "val_psnr_db"]
    frame = frame.loc[frame["step"] > from_step, columns].dropna(thresh=3)
    return frame.sort_values(["rank", "step", "loss"], ignore_index=True)


def same_tensors(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.glob("*.safetensors"))
    return names == sorted(path.name for path in b.glob("*.safetensors")) and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2, "schedule": "constant", "warmup_steps": 7, "ema_decay": 0.9},
        {"amp": "fp16", "patch_size": 8, "adversarial_weight": 0.1, "adversarial_after": 3},
        {"cache_rate": 0.5, "replace_rate": 0.5},
    ],
    ids=str,
)
def test_five_steps_and_five_more_equal_ten_to_the_last_bit(
    cluster3: nbgpu.Cluster, tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = {**SMALL, **settings, "runs_dir": str(tmp_path)}
    straight = cluster3.train("autoencoder", **settings).wait(400)
    half_way = straight.folder / "checkpoints" / "step-00000005"
    resumed = cluster3.train("autoencoder", **settings, resume=str(half_way)).wait(400)
    assert resumed.folder != straight.folder
    assert resumed.info.resumed_from == str(half_way)
    assert resumed.notes()[-1] == f"going on from step-00000005 of {straight.folder.name}"
    expected = numbers(straight, from_step=5)
    assert len(expected) == 3 * 5 + 2
    pd.testing.assert_frame_equal(numbers(resumed, from_step=0), expected, check_exact=True)
    assert same_tensors(resumed.checkpoint(), straight.checkpoint())
    states = [checkpoint_files.state(run.checkpoint()) for run in (resumed, straight)]
    for name in ("step", "optimizer", "schedule", "scaler"):
        assert states[0][name] == states[1][name], name
    assert resumed.result() == straight.result()


@pytest.mark.long
@row(
    "all processes of a run are ended by SIGKILL",
    "resume='auto' goes on from its newest checkpoint; the model at the end is that of an unhurt run, to the last bit",
    bound_s=None,
)
def test_a_run_that_was_killed_goes_on_with_auto_from_the_command_line(
    cluster3: nbgpu.Cluster, tmp_path: Path
) -> None:
    settings = {
        **SMALL,
        "steps": 60,
        "checkpoint_every": 5,
        "val_fraction": 0,
        "runs_dir": str(tmp_path / "runs"),
    }
    write_toml(
        tmp_path / "run.toml", ClusterConfig(gpus="none", ranks=3), train_config("autoencoder", **settings)
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with (
        (tmp_path / "told").open("w") as told_before,
        subprocess.Popen(
            [*torchrun, "-m", "nbgpu.engine.train", str(tmp_path / "run.toml")],
            stdout=told_before,
            stderr=told_before,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        ) as killed,
    ):
        give_up_s = time.monotonic() + 300
        while not list(tmp_path.glob("runs/*/checkpoints/step-*[05]")):
            waits = killed.poll() is None and time.monotonic() < give_up_s
            assert waits, f"no checkpoint came\n{(tmp_path / 'told').read_text()}"
            time.sleep(0.002)
        for process in [*psutil.Process(killed.pid).children(recursive=True), killed]:
            process.kill()
    (folder,) = (tmp_path / "runs").iterdir()
    step = max(int(path.name.removeprefix("step-")) for path in checkpoint_files.checkpoints(folder))
    assert step < 60, "the run had ended before it was killed: this test shows nothing"

    command = [
        sys.executable,
        "-m",
        "nbgpu.cli",
        "train",
        "autoencoder",
        "--config",
        str(tmp_path / "run.toml"),
    ]
    told = subprocess.run(
        [*command, "--resume", "auto"], check=True, capture_output=True, text=True, timeout=360
    )
    assert told.stderr.count(f"going on from step-{step:08d} of {folder.name}") == 1
    (resumed,) = set((tmp_path / "runs").iterdir()) - {folder}
    straight = cluster3.train(
        "autoencoder",
        **settings,
    ).wait(400)
    assert same_tensors(checkpoint_files.checkpoints(resumed)[0], straight.checkpoint())


def test_auto_passes_over_a_damaged_checkpoint_loudly(
    cluster3: nbgpu.Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "resume": "auto"}
    first = cluster3.train("autoencoder", **settings).wait(400)
    beginning = (
        f"resume='auto' found no checkpoint of autoencoder in {tmp_path}: training starts from the beginning"
    )
    assert first.notes() == [beginning]
    path = first.checkpoint() / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    damaged = "step-00000010 is damaged (model.safetensors: sha256 differs)"
    assert first.checkpoint().name == "step-00000005"
    assert damaged in caplog.text
    second = cluster3.train("autoencoder", **settings).wait(400)
    name = first.folder.name
    expected = f"checkpoint {damaged.replace(' is', f' of {name} is')}; going on from step-00000005 of {name}"
    assert second.notes() == [expected]
    assert expected in caplog.text
    assert set(second.metrics().dropna(subset="loss")["step"]) == {6, 7, 8, 9, 10}
    # All of the second one's steps are done.
    with pytest.raises(nbgpu.ConfigError, match="all 10 steps are done there, and steps is 10"):
        cluster3.train("autoencoder", **settings)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.long
def test_new_settings_and_another_number_of_ranks_count_after_a_resume_and_are_said(
    cluster3: nbgpu.Cluster, tmp_path: Path
) -> None:
    """The second run is one process with no launcher, which is also how torchrun's ranks train."""
    # A small network, because processors without AVX-512 emulate bf16.
    settings = {**SMALL, "runs_dir": str(tmp_path / "first"), "schedule": "constant", "warmup_steps": 0}
    settings |= {"channels": (8, 16), "latent_channels": 2}
    first = cluster3.train("autoencoder", **settings).wait(400)
    changed = {"lr": 1e-5, "steps": 12, "amp": "bf16", "resume": str(first.folder), "clip_norm": 0.5}
    goes_on = [
        f"going on from step-00000010 of {first.folder.name}",
        "goes on with other settings: steps was 10, is 12; lr was 0.004, is 1e-05; clip_norm was 1.0, is 0.5; "
        "amp was 'off', is 'bf16'",
    ]
    # The plan says so before anything starts, and refuses what the run would refuse.
    planned = dict(cluster3.plan("autoencoder", **{**settings, **changed}).rows())
    assert planned["begins"].splitlines() == goes_on
    with pytest.raises(nbgpu.ConfigError, match="there is no such folder"):
        cluster3.plan("autoencoder", **settings, resume=str(tmp_path / "nowhere"))
    config = train_config("autoencoder", **{**settings, **changed, "runs_dir": str(tmp_path / "second")})
    write_toml(tmp_path / "run.toml", ClusterConfig(gpus="none", ranks=1), config)
    command = [sys.executable, "-m", "nbgpu.engine.train", str(tmp_path / "run.toml")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=800)
    (folder,) = (tmp_path / "second").iterdir()
    assert done.stdout.startswith(f"finished: {folder}\n")
    records, _ = Reader(folder, world_size=1, live=False).since()
    notes = [r.text for r in records if isinstance(r, Event) and r.kind == "note"]
    # Some processors have no instructions for 16 bits, which a note says.
    assert [note for note in notes if not note.startswith("amp=")] == [
        *goes_on,
        "goes on with another number of ranks: 3 ranks then, 1 now",
        "an epoch has 12 steps now, 4 before; epoch 3 begins again",
    ]
    rates = {r.step: r.values["lr"] for r in records if isinstance(r, Sample) and "lr" in r.values}
    assert rates == {11: 1e-5, 12: 1e-5}


def test_epochs_go_on_from_where_they_were_with_another_batch_size(
    cluster3: nbgpu.Cluster, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, "runs_dir": str(tmp_path), "val_every": 0}
    del settings["steps"]
    first = cluster3.train("autoencoder", **settings, batch_size=1, epochs=2).wait(400)
    steps = first.info.steps_per_epoch
    at = first.folder / "checkpoints" / "step-00000010"
    assert divmod(10, steps) == (1, 2)  # in the middle of the second epoch
    resumed = cluster3.train("autoencoder", **settings, batch_size=2, epochs=3, resume=str(at)).wait(400)
    assert resumed.info.steps_per_epoch == steps // 2
    # One epoch was whole. The second begins again, with half as many steps, and the third follows.
    assert resumed.info.total_steps == 10 + 2 * (steps // 2)
    spans = [resumed.info.epoch_at(step) for step in (11, 10 + steps // 2, 11 + steps // 2)]
    assert [span.epoch for span in spans] == [2, 2, 3]
    assert f"an epoch has {steps // 2} steps now, {steps} before; epoch 2 begins again" in resumed.notes()


@row(
    "the disk is full when a run writes a checkpoint",
    "a note says so, training goes on, the last good checkpoint stays; at the end it is an error, after the result",
    bound_s=None,
)
@pytest.mark.one_host("the ranks do not write on the notebook's disk there")
def test_on_a_full_disk_training_goes_on_and_says_so(
    cluster3: nbgpu.Cluster, tmp_path: Path, small_disk: Any
) -> None:
    roomy = cluster3.train("autoencoder", **{**SMALL, "steps": 2}, runs_dir=str(tmp_path / "roomy")).wait(400)
    size_bytes = sum(path.stat().st_size for path in roomy.checkpoint().iterdir())
    disk = small_disk(int(1.7 * size_bytes))
    run = cluster3.train(
        "autoencoder", **{**SMALL, "checkpoint_every": 2, "val_every": 0}, runs_dir=str(disk)
    )
    failure = "could not be written: No space left on device; the last good one is step-00000002"
    with pytest.raises(nbgpu.RankError, match=f"checkpoint at step 10 {failure}"):
        run.wait(400)
    assert {f"checkpoint at step {step} {failure}" for step in (4, 6, 8)} <= set(run.notes())
    assert run.checkpoint().name == "step-00000002"
    assert len(list((run.folder / "checkpoints").iterdir())) == 1
    frame = run.metrics().dropna(subset="loss")
    assert sorted(frame["step"]) == sorted([*range(1, 11)] * 3)
    assert run.result() is not None
    # The ranks are in good order.
    assert cluster3.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400).status == "finished"
