"""Patches that are no cubes, from the setting to the result and to new volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.networks.nets import AutoencoderKL
from scipy.fft import dctn

from nbgpu.config import flags, read_toml, train_config
from nbgpu.config.settings import as_text, from_text
from nbgpu.engine.data.loader import grid_patches
from nbgpu.engine.workload.by_name import load
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.autoencoder.baselines import finest_grid, lowest_frequencies, trilinear
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.inference import reconstruct_volume
from nbgpu.recipes.autoencoder.prediction import encoded
from nbgpu.recipes.autoencoder.recipe import Autoencoder
from nbgpu.recipes.phantoms import phantom

PATCH = (16, 8, 12)
CPU = torch.device("cpu")


def recipe_of(**values: Any) -> Autoencoder:
    recipe = load(
        train_config(
            "autoencoder", **{"patch_size": PATCH, "channels": (8, 16), "latent_channels": 2, **values}
        )
    )
    assert isinstance(recipe, Autoencoder)
    return recipe


def test_the_setting_is_one_number_or_three(tmp_path: Path) -> None:
    for value, patch in ((16, (16, 16, 16)), ((16,), (16, 16, 16)), ([112, 128, 80], (112, 128, 80))):
        config = train_config("autoencoder", patch_size=value)
        assert isinstance(config, AutoencoderConfig)
        assert config.patch == patch
        written = tmp_path / "run.toml"
        (tmp_path / "run.toml").write_text(f'[train]\nrecipe = "autoencoder"\npatch_size = {list(patch)}\n')
        read = read_toml(written)[1]
        assert isinstance(read, AutoencoderConfig)
        assert read.patch == patch
    for text, typed in (("24", 24), ("112 128 80", (112, 128, 80)), ("112, 128, 80", (112, 128, 80))):
        assert from_text(AutoencoderConfig, "patch_size", text) == typed
        assert from_text(AutoencoderConfig, "patch_size", as_text(typed)) == typed


def test_the_flag_takes_one_number_or_three() -> None:
    for words, value in ((["24"], 24), (["112", "128", "80"], (112, 128, 80))):
        parsed = flags.parse([AutoencoderConfig], ["--patch-size", *words], prog="nbgpu", hidden=("recipe",))
        assert parsed["patch_size"] == value


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"patch_size": (16, 8)},
            "patch_size=(16, 8) must be one number, or three: to the right, front and top",
        ),
        (
            {"patch_size": (16, 8, 12), "channels": (4, 4, 4, 4)},
            "patch_size=(16, 8, 12) must be a multiple of 8, because 4 channel levels halve it 3 times",
        ),
        (
            {"patch_size": (64, 64, 16), "adversarial_weight": 0.1, "discriminator_layers": 3},
            "discriminator_layers=3 are too many for patch_size=(64, 64, 16): at most 2",
        ),
    ],
)
def test_edges_that_do_not_go_together_are_told(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_config("autoencoder", **values)
    assert said in str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((16, 4, 16), r"patch_size=\(16, 4, 16\) must be at least 8"),
        ((16, 16, 30), r"patch_size = \(16, .* Give a value within: 0 to 512, a multiple of 4"),
    ],
)
def test_each_edge_has_the_bounds_of_one(value: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_config("autoencoder", patch_size=value)


def test_a_run_learns_from_them_against_a_discriminator_and_tells_its_result() -> None:
    recipe = recipe_of(data="phantoms", num_phantoms=12, adversarial_weight=0.1, rotate90_prob=1.0)
    loaders = recipe.build_loaders(0, 1)
    batch = next(iter(loaders.train))
    loaders.close()
    assert batch["image"].shape == (2, 1, *PATCH)
    assert all(held_out["image"].shape[2:] == PATCH for held_out in loaders.val)
    model, discriminator = recipe.build_model(), recipe.build_discriminator()
    assert discriminator is not None
    terms, seen = recipe.loss_against(discriminator, model, batch)
    recipe.discriminator_loss(discriminator, seen).backward()
    terms["loss"].backward()
    assert model(recipe.example(3)["image"])[1].shape == (3, 2, 8, 4, 6)
    result = recipe.result(model, CPU)
    # 2 x 8 x 4 x 6 = 384 numbers.
    assert "held-out patches of 16 x 8 x 12 voxels" in result["note"]
    assert "keep 384 numbers, trilinear sampling 10 x 5 x 7 = 350" in result["note"]
    assert recipe.pictures(model, batch)


def test_the_finest_grid_keeps_the_shape_of_the_patch_and_the_number_of_values() -> None:
    assert finest_grid((16, 16, 16), 1024) == (10, 10, 10)
    assert finest_grid((8, 8, 8), 128) == (5, 5, 5)
    assert finest_grid((16, 8, 12), 1) == (1, 1, 1)
    assert finest_grid((16, 8, 12), 10**6) == (16, 8, 12)
    assert finest_grid((16, 8, 12), 16 * 8 * 12 // 8) == (8, 4, 6)
    image = torch.rand(1, 1, *PATCH)
    assert torch.equal(trilinear(image, PATCH), image)
    assert trilinear(image, (8, 4, 6)).shape == image.shape


def test_low_frequencies_are_those_of_long_waves() -> None:
    noise = torch.from_numpy(np.random.default_rng(0).uniform(0.4, 0.6, (1, 1, 16, 8, 8)))
    frequencies = dctn(lowest_frequencies(noise, 5).numpy(), axes=(2, 3, 4), norm="ortho")
    kept = {tuple(int(i) for i in index[2:]) for index in np.argwhere(np.abs(frequencies) > 1e-9)}
    # Two half waves over 16 voxels are as long as one over 8.
    assert kept == {(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1)}


def test_phantoms_are_stretched() -> None:
    volume = phantom(PATCH, seed=0, index=0)
    assert volume.shape == (1, *PATCH)
    assert 0 <= float(volume.min()) < 0.01 < 0.2 < float(volume.max()) <= 1


def test_held_out_patches_lie_on_a_grid_with_steps_of_their_own() -> None:
    image = torch.rand(1, 18, 16, 8) + 1
    patches = grid_patches(image, (8, 16, 4), max_patches=100, min_foreground=0.0)
    # Along the axes cells start at 1, 5, 9; at 0; and at 0, 2, 4.
    assert patches.shape == (9, 1, 8, 16, 4)
    assert torch.equal(patches[1, 0], image[0, 1:9, :, 2:6])
    assert torch.equal(grid_patches(image, (8, 8, 8), 100), grid_patches(image, 8, 100))


def write(path: Path, shape: tuple[int, ...], affine: np.ndarray | None = None) -> Path:
    voxels = np.random.default_rng(0).random(shape).astype(np.float32) + 1
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)
    return path


TOP_RIGHT_FRONT = np.array([[0, 1.0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
"""A file whose axes point to the top, right and front."""


def test_a_file_is_compared_with_the_patch_along_its_turned_axes(tmp_path: Path) -> None:
    good = write(tmp_path / "good.nii", (12, 16, 8), TOP_RIGHT_FRONT)
    bad = write(tmp_path / "bad.nii", (16, 8, 12), TOP_RIGHT_FRONT)
    for name in "ab":
        write(tmp_path / f"{name}.nii", (17, 9, 13))
    with pytest.raises(DataError) as caught:
        recipe_of(data=str(tmp_path)).build_loaders(0, 1)
    assert str(caught.value).splitlines() == [
        f"{bad}: has 8 x 12 x 16 voxels, which is smaller than the patch. Set patch_size to at most 8 x 12 x 16 (right, "
        "front, top), or resample it"
    ]
    bad.unlink()
    loaders = recipe_of(data=str(tmp_path), patches_per_volume=2, val_fraction=0.4).build_loaders(0, 1)
    assert next(iter(loaders.train))["image"].shape[2:] == PATCH
    loaders.close()
    assert good.exists()


def test_a_single_volume_is_cut_by_the_edge_along_its_longest_axis(tmp_path: Path) -> None:
    path = write(tmp_path / "one.nii", (16, 8, 30))
    recipe = recipe_of(data=str(path), val_fraction=0.1)
    parts = [recipe._steps()(item)["image"] for item in recipe._parts().everything]
    assert [tuple(part.shape[1:]) for part in parts] == [(16, 8, 18), (16, 8, 12)]


def test_windows_of_new_volumes_are_the_patches(tmp_path: Path) -> None:
    recipe = recipe_of(data="phantoms")
    network = recipe.build_model().eval()
    assert isinstance(network, AutoencoderKL)
    volume = torch.rand(1, *PATCH)
    with torch.no_grad():
        expected = network.encode(volume[None])[0][0]
    reconstruction, latent = reconstruct_volume(network, volume, PATCH)
    torch.testing.assert_close(latent, expected)
    assert reconstruction.shape == volume.shape

    path = write(tmp_path / "new.nii", (13, 18, 9), TOP_RIGHT_FRONT)
    made = encoded(network, CPU, recipe.config, {"name": str(path), "image": path}, tmp_path / "out")
    # 18 x 9 x 13 voxels to the right, front and top.
    assert np.load(made.files[0]).shape == (2, 9, 5, 7)
    assert nibabel.load(made.files[1]).shape == (13, 18, 9)
