"""Whole volumes through a trained autoencoder, in windows on both ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import AutoencoderKL

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.autoencoder.inference import encode_volumes, reconstruct_volume
from nbgpu.recipes.trained import load_trained

SHAPES = {"a.nii.gz": (21, 18, 15), "b c.nii": (8, 9, 33)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volumes")
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        voxels = rng.random(shape).astype(np.float32) + 10
        # Axes to the left and the back, 2 mm apart, away from the origin.
        affine = np.array([[-2.0, 0, 0, 30], [0, -2, 0, 40], [0, 0, 2, -7], [0, 0, 0, 1]])
        nibabel.save(nibabel.Nifti1Image(voxels, affine), folder / name)
    return folder


@pytest.fixture(scope="module")
def run(cluster2: nbgpu.Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings: dict[str, Any] = {"patch_size": 8, "steps": 4, "channels": (4, 8), "val_every": 4}
    settings |= {"latent_channels": 2, "lr": 4e-3}
    runs_dir = str(tmp_path_factory.mktemp("runs"))
    return cluster2.train("autoencoder", data=str(data), **settings, runs_dir=runs_dir).wait(400)


def trained(run: Run) -> AutoencoderKL:
    network = load_trained(run.folder)
    assert isinstance(network, AutoencoderKL)
    return network


def test_windows_are_blended_as_monai_does_it(run: Run) -> None:
    network, volume = trained(run), torch.rand(1, 20, 16, 12)
    reconstruction, latent = reconstruct_volume(network, volume, 8, overlap=0.25)
    assert latent.shape == (2, 10, 8, 6)
    inferer = SlidingWindowInferer(8, overlap=0.25, mode="gaussian")
    with torch.no_grad():
        expected = inferer(volume[None], lambda x: network.reconstruct(x).clamp(0, 1))
        assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(reconstruction, expected[0])
    # One window, and nothing to blend.
    whole = torch.rand(1, 8, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            reconstruct_volume(network, whole, 8)[1], network.encode(whole[None])[0][0]
        )


def test_both_ranks_give_what_one_does(cluster2: nbgpu.Cluster, run: Run, tmp_path: Path) -> None:
    alone = encode_volumes(run.folder, tmp_path / "one")
    cluster2.execute(
        "from nbgpu.recipes.autoencoder.inference import encode_volumes\n"
        f"latents = encode_volumes({str(run.folder)!r}, {str(tmp_path / 'two')!r}, rank, world_size, device)\n"
        "scale = latents.scale_factor"
    )
    index = json.loads((tmp_path / "two" / "latents.json").read_text())
    assert cluster2.pull("scale", ranks="all") == {
        0: index["scale_factor"],
        1: index["scale_factor"],
    }
    assert [v["name"] for v in index["volumes"]] == [v.name for v in alone.volumes]
    values = []
    for volume, one in zip(index["volumes"], alone.volumes, strict=True):
        source = nibabel.load(volume["name"])
        latents = [np.load(tmp_path / folder / one.latent) for folder in ("one", "two")]
        np.testing.assert_allclose(latents[1], latents[0], atol=1e-5)
        assert latents[0].shape == (2, *((n + 1) // 2 for n in source.shape))
        values.append(latents[0].ravel())
        # It lies where the volume does.
        image = nibabel.load(tmp_path / "two" / volume["reconstruction"])
        assert image.shape == source.shape
        np.testing.assert_allclose(image.affine, nibabel.as_closest_canonical(source).affine)
        assert volume["psnr_db"] == pytest.approx(one.psnr_db, abs=0.01)
    assert (np.concatenate(values) * index["scale_factor"]).std() == pytest.approx(1, abs=1e-4)
    assert [v.latent for v in alone.volumes] == ["a.latent.npy", "b-c.latent.npy"]


def test_a_bad_file_is_named_on_every_rank(
    cluster2: nbgpu.Cluster, run: Run, data: Path, tmp_path: Path
) -> None:
    voxels = np.full((9, 9, 9), np.nan, np.float32)
    bad = tmp_path / "bad.nii"
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), bad)
    (tmp_path / "list.json").write_text(json.dumps([str(data / "a.nii.gz"), str(bad)]))
    code = (
        "from nbgpu.recipes.autoencoder.inference import encode_volumes\n"
        f"encode_volumes({str(run.folder)!r}, {str(tmp_path / 'out')!r}, rank, world_size, device, "
        f"data={str(tmp_path / 'list.json')!r})"
    )
    with pytest.raises(nbgpu.RankError, match=r"bad\.nii: 729 of 729 voxels are NaN"):
        cluster2.execute(code)
    bad.unlink()
    with pytest.raises(DataError, match=r"bad\.nii: there is no such file"):
        encode_volumes(run.folder, tmp_path / "out", data=str(tmp_path / "list.json"))
    with pytest.raises(ConfigError, match="window=7 must be a multiple of 2"):
        encode_volumes(run.folder, tmp_path / "out", window=7)
    with pytest.raises(ConfigError, match="max_volumes=0 must be 1 or more"):
        encode_volumes(run.folder, tmp_path / "out", max_volumes=0)


def test_the_panel_gets_pictures_of_each_validation(run: Run) -> None:
    events = [r for r in run.reader.since()[0] if getattr(r, "kind", "") == "pictures"]
    assert [(event.rank, event.step) for event in events] == [(0, 4)]  # type: ignore[union-attr]
    images = events[0].detail["images"]  # type: ignore[union-attr]
    assert list(images) == ["original", "reconstruction", "absolute error of the reconstruction"]
    assert all(source.startswith("data:image/png;base64,") for source in images.values())
