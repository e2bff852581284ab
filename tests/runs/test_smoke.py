"""A smoke test before a long run: what it cuts down, what it says, and what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbgpu
from nbgpu.run_folder import checkpoint_files

LONG: dict[str, Any] = {
    "smoke_test": True,
    "data": "phantoms",
    "patch_size": 8,
    "num_phantoms": 20,
    "steps": 1_000_000,
    "warmup_steps": 1000,
    "batch_size": 64,
    "checkpoint_every": 1000,
    "dataset": "smart",
    "cache_rate": 0.5,
    "replace_rate": 0.5,
}

PATCH = """
from nbgpu.recipes.autoencoder.recipe import Autoencoder
_good = Autoencoder.loss, Autoencoder.validate, Autoencoder.result
anomalies, anomalies_in_result = [], []
def _loss(self, model, batch):
    anomalies.append(torch.is_anomaly_enabled())
    {in_loss}
    return _good[0](self, model, batch)
def _validate(self, model, batch):
    return {{name: value * ({times}) for name, value in _good[1](self, model, batch).items()}}
def _result(self, model, device):
    anomalies_in_result.append(torch.is_anomaly_enabled())
    return _good[2](self, model, device)
Autoencoder.loss, Autoencoder.validate, Autoencoder.result = _loss, _validate, _result
"""
DRIFT = "[p.data.add_(1e-6 * rank) for p in list(model.parameters())[:1]]"


@pytest.fixture
def patched(cluster2: nbgpu.Cluster) -> Iterator[Any]:
    """Makes the recipe on the ranks another one for a test."""
    yield lambda in_loss="pass", times="1": cluster2.execute(PATCH.format(in_loss=in_loss, times=times))
    cluster2.execute("Autoencoder.loss, Autoencoder.validate, Autoencoder.result = _good")


@pytest.mark.long
def test_it_is_short_and_says_what_it_looked_at(
    cluster2: nbgpu.Cluster, patched: Any, tmp_path: Path
) -> None:
    patched()
    settings = {**LONG, "accumulate": 4, "ema_decay": 0.99, "best_metric": "loss"}
    run = cluster2.train("autoencoder", **settings, runs_dir=str(tmp_path)).wait(400)
    assert run.status == "finished"
    assert (run.config.steps, run.config.batch_size, run.config.accumulate) == (3, 1, 2)
    passed, batches, validation, moved, weights, saved = run.notes()[-6:]
    assert passed == ("smoke test passed: 3 steps of 2 samples on each of 2 ranks, strategy='ddp', amp='off'")
    assert batches == "batches are image (1, 1, 8, 8, 8) float32 on every rank, with no NaN or Inf"
    assert validation.startswith("validation gives loss ")
    assert moved.startswith("each of the ")
    assert weights == "weights are the same on all 2 ranks, to the last bit"
    assert saved == "step-00000003 was written and read back, to the last bit"
    assert not checkpoint_files.damage(run.checkpoint("best"))
    assert cluster2.pull("anomalies", rank=1) == [True] * 6
    assert cluster2.pull("anomalies_in_result", rank=0) == [False]
    assert run.result()["note"].startswith("A smoke test's result, of a few samples after three steps")
    assert cluster2.execute("print(torch.is_anomaly_enabled())")[1] == "False\n"


@pytest.mark.long
def test_it_goes_with_shared_out_weights_too(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {**LONG, "strategy": "fsdp", "val_every": 0, "amp": "bf16"}
    notes = cluster2.train("autoencoder", **settings, runs_dir=str(tmp_path)).wait(400).notes()
    assert any(note.endswith("strategy='fsdp', amp='bf16'") for note in notes)
    assert "there was no validation, because val_every=0 or no sample is held out" in notes
    assert "weights are shared out over the ranks: there is nothing to compare" in notes


@pytest.mark.long
def test_what_it_finds_fails_it(cluster2: nbgpu.Cluster, patched: Any, tmp_path: Path) -> None:
    patched(in_loss=DRIFT, times="float('nan') if rank == 1 else 1")
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.train("autoencoder", **LONG, runs_dir=str(tmp_path)).wait(400)
    told = str(caught.value)
    assert "the smoke test failed:" in told
    assert "validation gives NaN or Inf: loss nan, psnr_db nan" in told
    assert "weights differ between the ranks, in encoder." in told


@pytest.mark.long
def test_steps_that_move_nothing_fail_it(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    with pytest.raises(nbgpu.RankError, match=r"no step moved any of the \d+ parameters, with lr=1e-50"):
        cluster2.train("autoencoder", **LONG, lr=1e-50, runs_dir=str(tmp_path)).wait(400)
