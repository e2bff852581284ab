"""Groups of weights with a learning rate of their own, on real ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.run_folder import checkpoint_files

SMALL: dict[str, Any] = {
    "num_patients": 40,
    "batch_size": 4,
    "widen_factor": 0.0625,
    "image_size": (8, 8, 8),
    "ema_decay": 0.0,
    "val_every": 0,
    "work_out_result": False,
    "threads": 1,
}


def train(cluster: nbgpu.Cluster, tmp_path: Path, **settings: Any) -> Run:
    run = cluster.train("survival", runs_dir=str(tmp_path), **{**SMALL, **settings}).wait(400)
    assert run.status == "finished", run.failures
    return run


def weights(run: Run, step: int) -> Mapping[str, torch.Tensor]:
    path = run.folder / "checkpoints" / checkpoint_files.checkpoint_name(step)
    found: Mapping[str, torch.Tensor] = load_file(path / checkpoint_files.MODEL)
    return found


def moved(run: Run, part: str) -> float:
    """How far the last of two steps moved the weights of a part, on the average."""
    before, after = weights(run, 1), weights(run, 2)
    names = [
        name for name in before if name.startswith(part) and "running" not in name and "num_" not in name
    ]
    return float(torch.cat([(after[name] - before[name]).abs().flatten() for name in names]).mean())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_the_encoder_learns_at_a_share_of_the_rate_which_is_shown(
    cluster3: nbgpu.Cluster, tmp_path: Path, strategy: str
) -> None:
    # Adam's first steps are as long as the rate, whatever the gradient.
    settings = {
        "strategy": strategy,
        "steps": 2,
        "checkpoint_every": 1,
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "optimizer": "adam",
        "lr_scaling": "linear",
        "lr_batch_size": 24,
        "batch_size": 4,
    }
    like_the_rest = train(cluster3, tmp_path, **settings)
    slower = train(cluster3, tmp_path, **settings, encoder_lr_factor=0.01)
    assert "lr_of_encoder" not in like_the_rest.metrics()
    frame = slower.metrics()
    assert frame["lr"].dropna().unique() == pytest.approx([0.001])
    assert frame["lr_of_encoder"].dropna().unique() == pytest.approx([0.00001])
    assert moved(slower, "encoder.") == pytest.approx(0.01 * moved(like_the_rest, "encoder."), rel=0.5)
    assert moved(slower, "head.") == pytest.approx(moved(like_the_rest, "head."), rel=0.5)
    assert (
        "the learning rate shown as lr is that of head; encoder at 0.01 times it (lr_of_encoder)"
        in slower.notes()
    )


def wait_until(condition: Callable[[], bool], run: Run) -> None:
    give_up_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up_s, f"{run} {run.failures}"
        assert not run.failures
        time.sleep(0.05)


@pytest.mark.long
def test_both_rates_follow_what_is_set_during_the_run(cluster3: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster3.train(
        "survival",
        runs_dir=str(tmp_path),
        **{**SMALL, "steps": 100_000, "schedule": "constant", "warmup_steps": 0, "encoder_lr_factor": 0.1},
    )

    def newest(name: str) -> float:
        frame = run.metrics()
        return float(frame[name].dropna().iloc[-1]) if name in frame else 0.0

    try:
        wait_until(lambda: newest("lr_of_encoder") == pytest.approx(0.0002), run)
        run.set(lr=0.004)
        wait_until(lambda: newest("lr_of_encoder") == pytest.approx(0.0004), run)
        assert newest("lr") == 0.004
        run.set(encoder_lr_factor=0.5, weight_decay=0.0)
        wait_until(lambda: newest("lr_of_encoder") == pytest.approx(0.002), run)
        assert newest("lr") == 0.004
    finally:
        run.stop()
        run.wait(400)
    (group, head) = checkpoint_files.state(run.checkpoint())["optimizer"]
    assert (group["lr_factor"], group["weight_decay"]) == (0.5, 0.0)
    assert (head["lr_factor"], head["weight_decay"]) == (1.0, 0.0)


@pytest.mark.long
def test_a_run_with_two_rates_goes_on_to_the_last_bit(cluster3: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {
        "steps": 16,
        "checkpoint_every": 5,
        "keep_checkpoints": 9,
        "encoder_lr_factor": 0.1,
        "freeze_epochs": 1,
        "find_unused_parameters": True,
        "ema_decay": 0.9,
    }
    straight = train(cluster3, tmp_path, **settings)
    half_way = straight.folder / "checkpoints" / checkpoint_files.checkpoint_name(5)
    resumed = train(cluster3, tmp_path, **settings, resume=str(half_way))
    columns = ["rank", "step", "loss", "grad_norm", "lr", "lr_of_encoder"]
    frames = [run.metrics()[columns].dropna() for run in (straight, resumed)]
    expected, found = (
        frame[frame["step"] > 5].sort_values(["rank", "step"], ignore_index=True) for frame in frames
    )
    assert len(expected) == 3 * 11
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    for name in (checkpoint_files.MODEL, checkpoint_files.OPTIMIZER, checkpoint_files.AVERAGE):
        assert (resumed.checkpoint() / name).read_bytes() == (straight.checkpoint() / name).read_bytes(), name
