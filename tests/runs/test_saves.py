"""The best checkpoint, early stopping, and the average of the weights, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.recipe import Autoencoder
from nbgpu.run_folder import checkpoint_files

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 8,
    "num_phantoms": 30,  # 4 steps an epoch
    "steps": 12,
    "val_every": 2,
    "keep_checkpoints": 1,
    "best_metric": "psnr_db",
    "best_mode": "max",
    "threads": 1,
}


def names(run: Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def best_step(run: Run, up_to: int) -> int:
    """Where the recorded validations were best, and first so."""
    values = run.metrics().dropna(subset=["val_psnr_db"]).set_index("step")["val_psnr_db"]
    return int(values[values.index <= up_to].idxmax())


@pytest.mark.long
def test_the_best_checkpoint_is_kept_found_and_gone_on_from(cluster3: nbgpu.Cluster, tmp_path: Path) -> None:
    # The wrong way round, so that the best one is not the newest.
    settings = {**SMALL, "runs_dir": str(tmp_path), "best_mode": "min"}
    run = cluster3.train("autoencoder", **settings, restore_best=True).wait(400)
    values = run.metrics().dropna(subset=["val_psnr_db"]).set_index("step")["val_psnr_db"]
    step = int(values.idxmin())
    assert step < 12, "the last validation was the best: this test shows nothing"
    best = run.checkpoint("best")
    assert best == run.folder / "checkpoints" / checkpoint_files.checkpoint_name(step)
    assert names(run) == [best.name, "step-00000012"]
    result = run.result()
    assert result is not None
    assert result["weights"] == f"of step {step}, which has the best validation (psnr_db {values[step]:.4g})"
    assert result["table"]["autoencoder"]["psnr_db"] == pytest.approx(values[step], abs=1e-2)
    again = cluster3.train("autoencoder", **settings, resume=str(run.folder / "best")).wait(400)
    assert again.info.resumed_from == str(best)
    # It was not beaten there: the earlier run's is still the best, and the end is the same to the last bit.
    assert again.checkpoint("best") == best
    for name in (checkpoint_files.MODEL, checkpoint_files.OPTIMIZER):
        assert (again.checkpoint() / name).read_bytes() == (run.checkpoint() / name).read_bytes()
    assert (
        checkpoint_files.state(again.checkpoint())["progress"]
        == checkpoint_files.state(run.checkpoint())["progress"]
    )
    of_last = again.result()
    assert of_last is not None
    assert of_last["weights"].startswith("of step 12; the best validation (psnr_db ")
    assert of_last["table"]["autoencoder"]["psnr_db"] == pytest.approx(values[12], abs=1e-2)


@pytest.mark.long
def test_a_run_that_gets_no_better_ends_early_on_all_ranks_and_says_so(
    cluster3: nbgpu.Cluster, tmp_path: Path
) -> None:
    patience = {"early_stop_patience": 2, "early_stop_min_delta": 1e6}
    settings = {**SMALL, **patience, "steps": 100, "checkpoint_every_epochs": 1, "keep_checkpoints": 3}
    run = cluster3.train("autoencoder", **settings, runs_dir=str(tmp_path)).wait(400)
    assert run.status == "finished"
    assert run.result() is not None
    assert run.metrics().dropna(subset=["loss"]).groupby("rank")["step"].max().tolist() == [6, 6, 6]
    best = best_step(run, up_to=6)
    assert run.checkpoint("best").name == checkpoint_files.checkpoint_name(best)
    (note,) = run.notes()
    assert note.startswith(
        "early stopping at step 6: psnr_db was not better by more than 1e+06 in the last 2 validations. The best is "
    )
    assert note.endswith(f", of step {best}: run.checkpoint('best')")
    assert run.checkpoint().name == "step-00000006"
    assert "step-00000004" in names(run)  # an epoch
    # Gone on from there it ends at once, and with more patience it goes on.
    resumed = {**settings, "resume": str(run.folder), "runs_dir": str(tmp_path)}
    assert "lr" not in cluster3.train("autoencoder", **resumed).wait(400).metrics()
    longer = cluster3.train("autoencoder", **{**resumed, "early_stop_patience": 4}).wait(400)
    assert longer.checkpoint().name == "step-00000010"


def test_a_run_without_a_best_checkpoint_says_why(cluster3: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {**SMALL, "best_metric": "", "best_mode": "min", "steps": 2, "runs_dir": str(tmp_path)}
    run = cluster3.train("autoencoder", **settings).wait(400)
    with pytest.raises(nbgpu.RunError, match="it follows no validation value"):
        run.checkpoint("best")


@pytest.mark.long
def test_validation_is_of_the_average_which_is_a_plain_file_for_the_model(
    cluster3: nbgpu.Cluster, tmp_path: Path
) -> None:
    settings = {**SMALL, "best_metric": "", "best_mode": "min", "ema_decay": 0.9, "runs_dir": str(tmp_path)}
    run = cluster3.train("autoencoder", **settings).wait(400)
    assert "ema_decay: validation and result are those of the averaged weights" in run.notes()
    assert isinstance(run.config, AutoencoderConfig)
    recipe = Autoencoder(run.config)
    model = recipe.build_model().eval()
    batches = recipe.build_loaders(rank=0, world_size=1).val
    psnr_db = {}
    for name in (checkpoint_files.MODEL, checkpoint_files.AVERAGE):
        model.load_state_dict(load_file(run.checkpoint() / name))
        with torch.no_grad():
            psnr_db[name] = torch.cat([recipe.validate(model, batch)["psnr_db"] for batch in batches]).mean()
    recorded = run.metrics().dropna(subset=["val_psnr_db"]).set_index("step")["val_psnr_db"]
    assert float(psnr_db[checkpoint_files.AVERAGE]) == pytest.approx(recorded[12], abs=1e-4)
    assert float(psnr_db[checkpoint_files.MODEL]) != pytest.approx(recorded[12], abs=1e-2)
    result = run.result()
    assert result is not None
    assert result["table"]["autoencoder"]["psnr_db"] == pytest.approx(recorded[12], abs=1e-2)
    # Shared out over the ranks it is the same average.
    shared = cluster3.train("autoencoder", **settings, strategy="fsdp").wait(400)
    of_shared = shared.metrics().dropna(subset=["val_psnr_db"]).set_index("step")["val_psnr_db"]
    assert of_shared.to_dict() == pytest.approx(recorded.to_dict(), abs=1e-3)
    # It changes nothing in the training itself.
    plain = cluster3.train("autoencoder", **{**settings, "ema_decay": 0}).wait(400)
    assert (plain.checkpoint() / checkpoint_files.MODEL).read_bytes() == (
        run.checkpoint() / checkpoint_files.MODEL
    ).read_bytes()
    # A run that goes on without one does, and one that goes on from a run without one begins it there.
    for earlier, decay, has_one in ((run, 0.0, False), (plain, 0.9, True)):
        later = {**settings, "steps": 13, "ema_decay": decay, "resume": str(earlier.folder)}
        path = cluster3.train("autoencoder", **later).wait(400).checkpoint()
        assert (path / checkpoint_files.AVERAGE).exists() == has_one
