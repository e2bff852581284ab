"""Trained models are applied to new data on both ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from monai.networks.nets import AutoencoderKL

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.engine.data.volumes import load_volume, scale_intensity
from nbgpu.recipes.autoencoder.inference import reconstruct_volume
from nbgpu.recipes.trained import load_trained

LEFT_BACK = np.array([[-2.0, 0, 0, 30], [0, -2, 0, 40], [0, 0, 2, -7], [0, 0, 0, 1]])
SHAPES = {"a.nii.gz": (21, 18, 15), "b c.nii": (8, 9, 33), "c.nii.gz": (16, 16, 16)}
QUICK: dict[str, dict[str, Any]] = {
    "survival": {"num_patients": 40, "widen_factor": 0.0625},
    "diffusion": {"num_phantoms": 16},
    "lithography": {"num_masks": 16, "size": 32, "source_cells": 7},
}
DATA = {"survival": "generated", "diffusion": "phantoms", "lithography": "generated"}

OWN = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbgpu.recipes.own import OwnRecipe


class Doubles(OwnRecipe):
    val_fraction: float = 0.0
    steps: int = 2

    def dataset(self):
        x = torch.linspace(-1, 1, 32)[:, None]
        return TensorDataset(x, 2 * x)

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def new_data(self, data):
        return TensorDataset(torch.from_numpy(np.load(data)))

    def predict(self, model, batch, stem):
        y = model(batch)
        np.save(stem.with_name(stem.name + ".npy"), y.numpy())
        return {"y": y[0, 0], "size": "large" if y > 0 else "small"}
"""


def write_volume(path: Path, shape: tuple[int, ...], seed: int = 0) -> None:
    voxels = np.random.default_rng(seed).integers(-500, 1500, shape).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(voxels, LEFT_BACK), path)


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    folder = tmp_path / "volumes"
    folder.mkdir()
    for seed, (name, shape) in enumerate(SHAPES.items()):
        write_volume(folder / name, shape, seed)
    return folder


@pytest.fixture(scope="module")
def run(cluster2: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings: dict[str, Any] = {"patch_size": 8, "steps": 4, "channels": (4, 8), "val_every": 2}
    return cluster2.train(
        "autoencoder",
        data="phantoms",
        num_phantoms=16,
        best_metric="loss",
        **settings,
        runs_dir=str(tmp_path_factory.mktemp("runs")),
    ).wait(400)


def table_of(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "predictions.csv", index_col="name")


def test_a_reconstruction_lies_on_the_volume_in_its_own_intensities(
    cluster2: nbgpu.Cluster, run: Run, volumes: Path, tmp_path: Path
) -> None:
    found = cluster2.predict(run, volumes, tmp_path / "out")
    assert not found.failed
    assert sorted({row.rank for row in found.rows}) == [0, 1]
    network = load_trained(run.folder)
    assert isinstance(network, AutoencoderKL)
    table = table_of(tmp_path / "out")
    assert [Path(name).name for name in table.index] == list(SHAPES)
    for name, files in table["files"].items():
        latent, image = (tmp_path / "out" / file for file in files.split("; "))
        volume = load_volume(Path(str(name)))
        scaled = scale_intensity(volume, str(name))
        expected, expected_latent = reconstruct_volume(network, scaled, 8)
        np.testing.assert_allclose(np.load(latent), expected_latent.numpy(), atol=1e-5)
        low = float(volume.min())
        high = float(np.percentile(volume.numpy(), 99.5))
        torch.testing.assert_close(load_volume(image), expected * (high - low) + low, rtol=0, atol=0.5)
        made, source = nibabel.load(image), nibabel.load(name)
        np.testing.assert_array_equal(made.affine, source.affine)
        assert made.shape == source.shape
    index = json.loads((tmp_path / "out" / "latents.json").read_text())
    values = np.concatenate([np.load(tmp_path / "out" / v["latent"]).ravel() for v in index["volumes"]])
    assert (values * index["scale_factor"]).std() == pytest.approx(1, abs=1e-4)
    assert index["intensities"] == "own"


def test_it_goes_on_with_what_is_missing(
    cluster2: nbgpu.Cluster, run: Run, volumes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    few = cluster2.predict(run.folder, volumes, out, max_samples=2)
    assert len(few.rows) == 2
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    whole = cluster2.predict(run.folder, volumes, out)
    assert len(whole.rows) == 3
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    assert len(after) == 3
    assert {name: after[name] for name in before} == before
    with pytest.raises(nbgpu.ConfigError, match="has the predictions of another job: data is"):
        cluster2.predict(run, volumes / "a.nii.gz", out)


def test_a_bad_file_fails_alone_and_is_done_once_it_is_mended(
    cluster2: nbgpu.Cluster, run: Run, volumes: Path, tmp_path: Path
) -> None:
    bad = volumes / "b c.nii"
    whole = bad.read_bytes()
    nibabel.save(nibabel.Nifti1Image(np.full((9, 9, 9), np.nan, np.float32), LEFT_BACK), bad)
    found = cluster2.predict(run, volumes, tmp_path / "out")
    assert list(found.failed) == [str(bad)]
    assert "729 of 729 voxels are NaN" in found.failed[str(bad)]
    assert f"no prediction for {bad}" in str(found)
    assert "729 of 729" in table_of(tmp_path / "out").loc[str(bad), "failed"]
    bad.write_bytes(whole)
    mended = cluster2.predict(run, volumes, tmp_path / "out")
    assert not mended.failed
    assert table_of(tmp_path / "out")["failed"].isna().all()


def test_bad_headers_are_told_together_before_anything_is_written(
    cluster2: nbgpu.Cluster, run: Run, volumes: Path, tmp_path: Path
) -> None:
    for name in ("x.nii.gz", "y.nii"):
        (volumes / name).write_bytes(b"no volume")
    with pytest.raises(nbgpu.RankError, match=r"(?s)x\.nii\.gz: .*y\.nii: "):
        cluster2.predict(run, volumes, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.npy"))
    found = cluster2.predict(run, volumes, tmp_path / "out", skip_bad=True)
    assert len(found.rows) == 3
    assert [line.partition(": ")[0] for line in found.left_out] == [
        str(volumes / "x.nii.gz"),
        str(volumes / "y.nii"),
    ]


def test_what_cannot_be_asked_is_told_together(cluster2: nbgpu.Cluster, run: Run, tmp_path: Path) -> None:
    with pytest.raises(nbgpu.ConfigError) as raised:
        cluster2.predict(run, tmp_path / "nowhere", tmp_path / "out", lr=1.0)
    assert "lr = 1.0 cannot be changed for a prediction" in str(raised.value)
    with pytest.raises(nbgpu.ConfigError, match="there is no such file or folder"):
        cluster2.predict(run, tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(nbgpu.ConfigError, match="is not empty, and it has no predictions"):
        cluster2.predict(run, "phantoms", tmp_path / "mine")
    field = cluster2.train(
        "microstructure", shape=(16, 16), limit_to=4, steps=1, runs_dir=str(tmp_path)
    ).wait(400)
    with pytest.raises(nbgpu.ConfigError, match="trains no model"):
        cluster2.predict(field, "phantoms", tmp_path / "out")


def test_the_checkpoint_is_the_one_that_is_asked_for(
    cluster2: nbgpu.Cluster, run: Run, tmp_path: Path
) -> None:
    for which in ("newest", "best"):
        cluster2.predict(run, "phantoms", tmp_path / which, checkpoint=which, max_samples=1)  # type: ignore[arg-type]
    chosen = {
        w: json.loads((tmp_path / w / "predict.json").read_text())["checkpoint"] for w in ("newest", "best")
    }
    assert all(Path(folder).is_dir() for folder in chosen.values())
    assert load_trained(run.folder, "best") is not None


@pytest.mark.parametrize("recipe", QUICK)
def test_every_recipe_writes_what_it_promises(cluster2: nbgpu.Cluster, recipe: str, tmp_path: Path) -> None:
    trained = cluster2.train(
        recipe, **QUICK[recipe], steps=2, batch_size=4, val_every=0, runs_dir=str(tmp_path / "runs")
    ).wait(400)
    found = cluster2.predict(trained, DATA[recipe], tmp_path / "out", max_samples=3)
    assert not found.failed
    table = table_of(tmp_path / "out")
    assert len(table) == 3
    written = [tmp_path / "out" / file for files in table["files"].dropna() for file in files.split("; ")]
    assert all(path.is_file() for path in written)
    if recipe == "survival":
        probabilities = table.filter(like="survival_").to_numpy()
        assert (np.diff(probabilities, axis=1) <= 0).all()
        # Two patients may be in one percentile.
        assert table.sort_values("log_hazard")["risk_percentile"].is_monotonic_increasing
        assert "C-index" in str(found)
    else:
        assert len(written) == {"diffusion": 3, "lithography": 9}[recipe]


def test_without_its_training_patients_a_model_still_gives_scores(
    cluster2: nbgpu.Cluster, volumes: Path, tmp_path: Path
) -> None:
    for number in range(12):
        write_volume(tmp_path / f"p{number}.nii.gz", (12, 12, 12), number)
    lines = [f"p{number}.nii.gz,{number + 1},{number % 2},{40 + 3 * number % 7}" for number in range(12)]
    table = tmp_path / "train.csv"
    table.write_text("\n".join(["image,time,event,age", *lines]))
    new = volumes / "new.csv"
    new.write_text("image,age\nc.nii.gz,50\n")
    runs = {}
    for features in ((), ("age",)):
        runs[features] = cluster2.train(
            "survival",
            data=str(table),
            features=features,
            image_size=(12, 12, 12),
            widen_factor=0.0625,
            steps=2,
            batch_size=2,
            val_every=0,
            runs_dir=str(tmp_path / "runs"),
        ).wait(400)
    with_groups = cluster2.predict(runs[()], new, tmp_path / "before")
    assert with_groups.frame()["risk_group"].between(1, 3).all()
    table.unlink()
    without = cluster2.predict(runs[()], new, tmp_path / "after")
    assert list(without.frame().columns) == ["log_hazard"]
    assert without.frame()["log_hazard"].item() == pytest.approx(with_groups.frame()["log_hazard"].item())
    assert "There are no risk groups" in str(without)
    assert f"{table}: there is no such file" in str(without)
    with pytest.raises(nbgpu.RankError, match="age: their scale is that of the training patients"):
        cluster2.predict(runs[("age",)], new, tmp_path / "none")


def test_a_recipe_of_ones_own_is_asked_for_its_predictions(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    (tmp_path / "doubles.py").write_text(OWN)
    trained = cluster2.train(str(tmp_path / "doubles.py"), runs_dir=str(tmp_path / "runs")).wait(400)
    np.save(tmp_path / "new.npy", np.array([[-3.0], [5.0], [0.5]], dtype=np.float32))
    with pytest.raises(nbgpu.ConfigError, match="set trust"):
        cluster2.predict(trained, tmp_path / "new.npy", tmp_path / "out")
    found = cluster2.predict(trained, tmp_path / "new.npy", tmp_path / "out", trust=True)
    frame = found.frame()
    model = load_trained(trained.folder, trust=True)
    with torch.no_grad():
        expected = model(torch.tensor([[-3.0], [5.0], [0.5]]))[:, 0].numpy()
    np.testing.assert_allclose(frame["y"], expected, rtol=1e-5)
    assert (frame["size"] == np.where(expected > 0, "large", "small")).all()
    assert [row.files for row in found.rows] == [[f"sample-{index}.npy"] for index in range(3)]


@pytest.mark.long
def test_the_command_predicts_and_says_what_failed(run: Run, volumes: Path, tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.ones((9, 9, 9), np.float32), LEFT_BACK), volumes / "flat.nii")

    def command(*flags: str) -> subprocess.CompletedProcess[str]:
        arguments = ["predict", str(run.folder), "--out", str(tmp_path / "out"), "--gpus", "none", *flags]
        return subprocess.run(
            [sys.executable, "-m", "nbgpu.cli", *arguments], capture_output=True, text=True, timeout=360
        )

    done = command("--data", str(volumes))
    assert done.returncode == 1, done.stderr
    assert "3 of 4 predicted" in done.stdout
    assert "flat.nii: is constant" in done.stdout
    (volumes / "flat.nii").unlink()
    (volumes / "bad.nii").write_bytes(b"")
    refused = command("--data", str(volumes))
    assert refused.returncode == 1
    assert "bad.nii" in refused.stderr + refused.stdout
    assert "CPU ranks" not in refused.stdout
