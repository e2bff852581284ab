"""A discriminator on GPUs: mixed precision, and its gradient over NCCL.

Written without a GPU at hand.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_model_and_discriminator_learn_and_are_the_same_on_all_ranks(tmp_path: Path, num_gpus: int) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    gpus = ",".join(map(str, range(num_gpus)))
    with (
        nbgpu.Cluster(gpus=gpus) as cluster,
        leaks.holding_family_of(psutil.Process(cluster.pids[0]).ppid()),
    ):
        for amp in ("off", "bf16", "fp16"):
            run = cluster.train("autoencoder", **SMALL, amp=amp, runs_dir=str(tmp_path)).wait(120)
            norms = run.metrics().dropna(subset=["discriminator_grad_norm"])
            by_step = norms.groupby("step")["discriminator_grad_norm"]
            assert list(by_step.groups) == [3, 4, 5, 6, 7, 8]
            assert by_step.nunique().max() == 1
        smoke = cluster.train(
            "autoencoder", **{**SMALL, "smoke_test": True}, amp="bf16", runs_dir=str(tmp_path)
        )
        assert any("to the last bit" in note for note in smoke.wait(120).notes())
