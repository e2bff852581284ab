"""A discriminator on GPUs: mixed precision, and its gradient over NCCL.

Written without a GPU at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leaks
import psutil
import pytest
import torch

import nbgpu

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 20,
    "steps": 8,
    "val_every": 0,
    "work_out_result": False,
    "adversarial_weight": 0.01,
    "adversarial_after": 2,
}


NUM_GPUS = pytest.mark.parametrize("num_gpus", [1, 2])


@contextmanager
def ranks(num_gpus: int) -> Iterator[nbgpu.Cluster]:
    """A rank on each of these GPUs; the test is skipped where there are fewer."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    with (
        nbgpu.Cluster(gpus=",".join(map(str, range(num_gpus)))) as cluster,
        leaks.holding_family_of(psutil.Process(cluster.pids[0]).ppid()),
    ):
        yield cluster


@NUM_GPUS
def test_a_smoke_test_with_a_discriminator_passes(tmp_path: Path, num_gpus: int) -> None:
    with ranks(num_gpus) as cluster:
        settings = {**SMALL, "smoke_test": True, "runs_dir": str(tmp_path)}
        smoke = cluster.train("autoencoder", **settings, amp="bf16")
        assert any("to the last bit" in note for note in smoke.wait(400).notes())


@NUM_GPUS
def test_model_and_discriminator_learn_and_are_the_same_on_all_ranks(tmp_path: Path, num_gpus: int) -> None:
    with ranks(num_gpus) as cluster:
        for amp in ("off", "fp16"):
            run = cluster.train("autoencoder", **SMALL, amp=amp, runs_dir=str(tmp_path)).wait(400)
            norms = run.metrics().dropna(subset=["discriminator_grad_norm"])
            by_step = norms.groupby("step")["discriminator_grad_norm"]
            assert list(by_step.groups) == [3, 4, 5, 6, 7, 8]
            assert by_step.nunique().max() == 1
