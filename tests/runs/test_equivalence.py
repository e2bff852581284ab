"""The same samples give the same losses, however they are spread over ranks and micro-batches.

Float64, 20 steps, real processes over gloo; regression.py trains them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, SUPPORT
from safetensors.torch import load_file

from nbgpu.run_folder import checkpoint_files

pytestmark = pytest.mark.one_host("torchrun starts the ranks")

COMMON: dict[str, Any] = {"steps": 20, "dtype": "float64", "lr": 1e-2, "val_every": 0, "clip_norm": 0.5}
ONE_RANK: dict[str, tuple[dict[str, Any], str]] = {
    "group": ({"batch_size": 8}, "group"),
    "batch": ({"batch_size": 8}, "batch"),
    "adam": ({"batch_size": 8, "optimizer": "adam", "clip_value": 0.05}, "group"),
    "sgd": ({"batch_size": 8, "optimizer": "sgd"}, "group"),
    "clipped by value": ({"batch_size": 8, "clip_value": 0.05}, "group"),
    "contest": ({"batch_size": 8, "clip_value": 0.05}, "contest"),
    "single": ({"batch_size": 8, "strategy": "single"}, "group"),
}
TWO_RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({"batch_size": 4}, "group"),
    "accumulated": ({"batch_size": 2, "accumulate": 2}, "group"),
    "global batch size": ({"global_batch_size": 8, "accumulate": 4}, "group"),
    "fsdp": ({"batch_size": 4, "strategy": "fsdp"}, "group"),
    "fsdp, accumulated": ({"batch_size": 2, "accumulate": 2, "strategy": "fsdp"}, "group"),
    "fsdp, recomputed": ({"batch_size": 4, "strategy": "fsdp", "checkpoint_activations": True}, "group"),
    "recomputed": ({"batch_size": 4, "checkpoint_activations": True, "static_graph": True}, "group"),
    "small buckets": (
        {
            "batch_size": 4,
            "bucket_mb": 1e-3,
            "gradient_as_bucket_view": False,
            "find_unused_parameters": True,
        },
        "group",
    ),
    "channels last": ({"batch_size": 4, "channels_last": True, "gradient_as_bucket_view": False}, "group"),
    "batch": ({"batch_size": 4, "sync_batchnorm": True}, "batch"),
    "batch, fsdp": ({"batch_size": 4, "sync_batchnorm": True, "strategy": "fsdp"}, "batch"),
    "batch, each rank its own": ({"batch_size": 4, "broadcast_buffers": False}, "batch"),
    "adam": ({"batch_size": 4, "optimizer": "adam", "clip_value": 0.05}, "group"),
    "sgd": ({"batch_size": 4, "optimizer": "sgd"}, "group"),
    "contest": ({"batch_size": 4, "clip_value": 0.05}, "contest"),
    "contest, accumulated": ({"batch_size": 2, "accumulate": 2, "clip_value": 0.05}, "contest"),
    "contest, fsdp": ({"batch_size": 4, "clip_value": 0.05, "strategy": "fsdp"}, "contest"),
    "fp16 hook": ({"batch_size": 4, "comm_hook": "fp16"}, "group"),
    "PowerSGD": ({"batch_size": 4, "comm_hook": "powersgd", "powersgd_rank": 1}, "group"),
}


def _losses(
    num_ranks: int, runs: dict[str, tuple[dict[str, Any], str]], *folder: str, **environment: str
) -> dict[str, list[float]]:
    argument = json.dumps([({**COMMON, **settings}, norm) for settings, norm in runs.values()])
    command = [
        sys.executable,
        str(SUPPORT / "regression.py"),
        str(num_ranks),
        argument,
        *folder,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(runs, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, list[float]]:
    return _losses(1, ONE_RANK)


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[float]]:
    return _losses(2, TWO_RANKS)


@pytest.mark.parametrize(
    ("spread", "alone"),
    [
        ("ddp", "group"),
        ("accumulated", "group"),
        ("global batch size", "group"),
        ("fsdp", "group"),
        ("fsdp, accumulated", "group"),
        ("fsdp, recomputed", "group"),
        ("recomputed", "group"),
        ("small buckets", "group"),
        ("channels last", "group"),
        ("batch", "batch"),
        ("batch, fsdp", "batch"),
        ("adam", "adam"),
        ("sgd", "sgd"),
        ("contest", "contest"),
        ("contest, accumulated", "contest"),
        ("contest, fsdp", "contest"),
    ],
)
def test_two_ranks_lose_what_one_does(
    on_one_rank: dict[str, list[float]], on_two_ranks: dict[str, list[float]], spread: str, alone: str
) -> None:
    assert len(on_two_ranks[spread]) == 20
    assert on_two_ranks[spread] == pytest.approx(on_one_rank[alone], rel=0, abs=1e-10)


def test_one_rank_needs_no_group(on_one_rank: dict[str, list[float]]) -> None:
    assert on_one_rank["single"] == pytest.approx(on_one_rank["group"], rel=0, abs=1e-10)


@pytest.mark.long
def test_a_run_goes_on_with_other_ranks_and_strategies_as_if_it_were_one(tmp_path: Path) -> None:
    """2 ranks with ddp, with fsdp, with ddp; 1 rank alone; 2 ranks with fsdp: 4 steps each."""
    common = {"schedule": "constant", "warmup_steps": 0, "ema_decay": 0.8}
    folders = {name: tmp_path / name for name in ("two", "one", "two again")}
    for folder in folders.values():
        folder.mkdir()

    def part(steps: int, strategy: str, batch_size: int, after: Path | None) -> tuple[dict[str, Any], str]:
        beginning = {"resume": str(after)} if after else {}
        return {
            **common,
            **beginning,
            "steps": steps,
            "strategy": strategy,
            "batch_size": batch_size,
        }, "group"

    two, one, two_again = folders.values()
    on_two = {
        "ddp": part(4, "ddp", 4, after=None),
        "fsdp": part(8, "fsdp", 4, after=two / "0"),
        "ddp again": part(12, "ddp", 4, after=two / "1"),
    }
    on_one = {"straight": part(20, "single", 8, after=None), "single": part(16, "single", 8, after=two / "2")}
    done = _losses(2, on_two, str(two)) | _losses(1, on_one, str(one))
    done |= _losses(2, {"fsdp again": part(20, "fsdp", 4, after=one / "1")}, str(two_again))
    straight = done.pop("straight")
    assert [len(losses) for losses in done.values()] == [4] * 5
    assert [loss for losses in done.values() for loss in losses] == pytest.approx(straight, rel=0, abs=1e-10)
    ended, expected = (
        {
            f"{file.name}: {name}": tensor
            for file in checkpoint_files.checkpoints(run)[0].glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for run in (two_again / "0", one / "0")
    )
    assert {name.split(":")[0] for name in ended} == {
        checkpoint_files.MODEL,
        checkpoint_files.OPTIMIZER,
        checkpoint_files.AVERAGE,
    }
    assert set(ended) == set(expected)
    for name, tensor in ended.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10, msg=name)


def test_batchnorm_that_is_not_synchronised_is_seen(
    on_one_rank: dict[str, list[float]], on_two_ranks: dict[str, list[float]]
) -> None:
    assert on_two_ranks["batch, each rank its own"] != pytest.approx(on_one_rank["batch"], rel=0, abs=1e-4)


def test_gradients_that_are_sent_with_fewer_bits_differ_a_little(
    on_one_rank: dict[str, list[float]], on_two_ranks: dict[str, list[float]]
) -> None:
    exact = on_one_rank["group"]
    assert on_two_ranks["fp16 hook"] != pytest.approx(exact, rel=0, abs=1e-10)
    assert on_two_ranks["fp16 hook"] == pytest.approx(exact, rel=0, abs=1e-3)
    # It sends whole gradients at first.
    assert on_two_ranks["PowerSGD"][:10] == pytest.approx(exact[:10], rel=0, abs=1e-10)
    assert on_two_ranks["PowerSGD"] != pytest.approx(exact, rel=0, abs=1e-10)
    assert on_two_ranks["PowerSGD"][-1] < 0.1 * on_two_ranks["PowerSGD"][0]


def test_the_optimizers_are_not_one_and_the_same(on_one_rank: dict[str, list[float]]) -> None:
    assert len({losses[-1] for name, losses in on_one_rank.items() if name in ("group", "adam", "sgd")}) == 3


def test_a_discriminator_counts_from_its_first_step_on(on_one_rank: dict[str, list[float]]) -> None:
    assert on_one_rank["contest"][:2] == on_one_rank["clipped by value"][:2]
    assert on_one_rank["contest"][2:] != on_one_rank["clipped by value"][2:]


@pytest.mark.long
@pytest.mark.release
def test_a_compiled_model_loses_the_same(on_one_rank: dict[str, list[float]], tmp_path: Path) -> None:
    runs = {"compiled": ({"batch_size": 8, "compile": True}, "group")}
    losses = _losses(1, runs, TMPDIR=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert list(tmp_path.rglob("*.so")), "something was compiled"
    assert losses["compiled"] == pytest.approx(on_one_rank["group"], rel=0, abs=1e-10)
