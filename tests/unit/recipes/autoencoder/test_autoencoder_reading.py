"""Volumes are trained on at one voxel size, from the chosen channels, and come back onto their own grids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.networks.nets import AutoencoderKL
from monai.transforms import Compose, EnsureChannelFirst, LoadImage, Orientation, Spacing

from nbgpu.config import train_config
from nbgpu.engine.data.decoding import Decode
from nbgpu.engine.data.volumes import load_volume
from nbgpu.engine.workload.by_name import load
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.autoencoder import inference, prediction
from nbgpu.recipes.autoencoder.inference import encode_volumes
from nbgpu.recipes.autoencoder.prediction import encoded
from nbgpu.recipes.autoencoder.reading import Prepare, VolumeReader
from nbgpu.recipes.autoencoder.recipe import Autoencoder

CPU = torch.device("cpu")
LEFT_BACK_TOP = np.array([[-1.0, 0, 0, 90], [0, -1.5, 0, 126], [0, 0, 3, -72], [0, 0, 0, 1]])
"""Voxels of 1 x 1.5 x 3 mm, with axes to the left, back and top."""


def recipe_of(**values: Any) -> Autoencoder:
    recipe = load(
        train_config("autoencoder", **{"patch_size": 8, "channels": (8, 16), "latent_channels": 2, **values})
    )
    assert isinstance(recipe, Autoencoder)
    return recipe


def write(path: Path, shape: tuple[int, ...], seed: int = 0) -> Path:
    """Write a volume that is smooth, with other values in each channel."""
    axes = np.meshgrid(*(np.linspace(0, 3, n) for n in shape[:3]), indexing="ij")
    voxels = 100 + 20 * sum(np.sin(axis + seed + number) for number, axis in enumerate(axes))
    if len(shape) == 4:
        voxels = np.stack([(1 + channel) * voxels ** (1 + channel) for channel in range(shape[3])], axis=-1)
    nibabel.save(nibabel.Nifti1Image(voxels.astype(np.float32), LEFT_BACK_TOP), path)
    return path


# ---- the voxel size ------------------------------------------------------------------------------------


def test_what_is_trained_on_is_monais_spacing_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii.gz", (20, 16, 10))
    recipe = recipe_of(data=str(path), spacing=(1.5, 1.5, 2.0), val_fraction=0)
    (item,) = recipe._parts().training
    image = recipe._steps()(item)["image"]
    by_monai = Compose(
        [LoadImage(), EnsureChannelFirst(), Orientation(axcodes="RAS", labels=None), Spacing((1.5, 1.5, 2.0))]
    )(path)
    # Everything but the darkest voxel is brighter than 0, so that no margin is cropped.
    assert image.shape == by_monai.shape == (1, 14, 16, 14)
    low, high = float(by_monai.min()), float(np.percentile(by_monai.numpy(), 99.5))
    expected = ((by_monai.as_tensor() - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(image, expected, rtol=0, atol=1e-4)


def test_left_out_it_is_that_of_each_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii.gz", (20, 16, 10))
    assert torch.equal(VolumeReader().read(path, "a"), load_volume(path))


def test_a_volume_that_becomes_smaller_than_the_patch_is_told_by_file(tmp_path: Path) -> None:
    for name, shape in {"a": (20, 16, 10), "b": (30, 30, 30), "c": (40, 20, 20)}.items():
        write(tmp_path / f"{name}.nii", shape)
    headless = write(tmp_path / "d.nii", (20, 20, 20))
    image = nibabel.load(headless)
    image.header.set_sform(np.diag([0, 1, 1, 1.0]), code=1)
    image.header.set_qform(None, code=0)
    nibabel.save(nibabel.Nifti1Image(image.get_fdata(), None, image.header), headless)
    with pytest.raises(DataError) as caught:
        recipe_of(data=str(tmp_path), spacing=3, patch_size=(12, 8, 8)).build_loaders(0, 1)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        f"{tmp_path}/a.nii: has 7 x 8 x 10 voxels at a spacing of 3 x 3 x 3 mm, which is smaller than the patch. Set "
        "patch_size to at most 7 x 8 x 10 (right, front, top), or take a smaller spacing",
        f"{tmp_path}/b.nii: has 11 x 16 x 30 voxels at a spacing of 3 x 3 x 3 mm, which is smaller than the patch. Set "
        "patch_size to at most 11 x 16 x 30 (right, front, top), or take a smaller spacing",
    ]
    assert lines[2:] == [
        f"{headless}: does not say in its header how large its voxels are. Correct it, or leave out spacing"
    ]
    # A cube is told the smallest edge.
    write(tmp_path / "d.nii", (20, 20, 20))
    with pytest.raises(DataError, match=r"a\.nii: has 7 x 8 x 10 .* Set patch_size to at most 7, or take"):
        recipe_of(data=str(tmp_path), spacing=3).build_loaders(0, 1)


def test_a_nan_is_told_before_interpolation_spreads_it(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.nii", (20, 16, 10))
    voxels = nibabel.load(tmp_path / "a.nii").get_fdata(dtype=np.float32).copy()
    voxels[3, 4, 5] = np.nan
    nibabel.save(nibabel.Nifti1Image(voxels, LEFT_BACK_TOP), tmp_path / "a.nii")
    with pytest.raises(DataError, match=r"a\.nii: 1 of 3200 voxels are NaN or infinite"):
        recipe_of(data=str(tmp_path), spacing=1).build_loaders(0, 1)


def test_caches_tell_voxel_sizes_and_channels_apart(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.nii", (20, 16, 10, 2)))
    settings: list[dict[str, Any]] = [
        {"image_channels": (0,)},
        {"image_channels": (1,)},
        {"image_channels": (0,), "spacing": 1},
        {"image_channels": (0,), "spacing": 1.5},
    ]
    prints = [Decode(recipe_of(data=path, **values)._steps()).fingerprint() for values in settings]
    assert len(set(prints)) == 4
    assert Decode(recipe_of(data=path, **settings[2])._steps()).fingerprint() == prints[2]


def test_the_template_is_resampled_as_well() -> None:
    recipe = recipe_of(data="mni152", spacing=2, val_fraction=0)
    (item,) = recipe._parts().training
    fine = recipe_of(data="mni152", val_fraction=0)._steps()(item)["image"]
    coarse = recipe._steps()(item)["image"]
    for half, whole in zip(coarse.shape[1:], fine.shape[1:], strict=True):
        assert abs(half - whole / 2) <= 1


class Kept(AutoencoderKL):
    """Gives back what it gets, with a latent of one channel."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(
            spatial_dims=3,
            in_channels=num_channels,
            out_channels=num_channels,
            channels=(4, 4),
            num_res_blocks=1,
            attention_levels=(False, False),
            latent_channels=num_channels,
            norm_num_groups=1,
            with_encoder_nonlocal_attn=False,
            with_decoder_nonlocal_attn=False,
        )

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.last = x
        latent = torch.nn.functional.avg_pool3d(x, 2)
        return latent, torch.ones_like(latent)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.last


def test_a_prediction_lies_on_the_files_own_grid_in_its_own_values(tmp_path: Path) -> None:
    path = write(tmp_path / "new.nii", (20, 16, 10))
    recipe = recipe_of(data=str(path), spacing=1, patch_size=(20, 24, 28))
    samples, problems = recipe.new_samples(str(path))
    assert problems == []
    made = encoded(Kept(1).eval(), CPU, recipe.config, samples[0], tmp_path / "out")
    given, written = nibabel.load(path), nibabel.load(made.files[1])
    np.testing.assert_allclose(written.affine, given.affine)
    assert written.shape == given.shape == (20, 16, 10)
    inner = (slice(2, -2),) * 3
    cut = np.percentile(given.get_fdata(), 99.0)
    expected = given.get_fdata()[inner]
    np.testing.assert_allclose(written.get_fdata()[inner][expected < cut], expected[expected < cut], atol=0.5)
    # 20 x 23.5 x 28 voxels of 1 mm, padded to latent voxels of two.
    assert np.load(made.files[0]).shape == (1, 10, 12, 14)


def test_whole_volumes_come_back_as_well_and_the_index_says_the_voxel_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "new.nii", (20, 16, 10))
    config = recipe_of(data=str(path), spacing=1, patch_size=(20, 24, 28)).config
    monkeypatch.setattr(inference.runs, "read_settings", lambda _: (None, config))
    monkeypatch.setattr(inference, "load_trained", lambda *_: Kept(1).eval())
    encode_volumes(tmp_path, tmp_path / "out")
    written = nibabel.load(tmp_path / "out" / "new.reconstruction.nii.gz")
    assert written.shape == (20, 16, 10)
    np.testing.assert_allclose(nibabel.affines.voxel_sizes(written.affine), (1, 1.5, 3))
    own = load_volume(path)[0]
    expected = (own - own.min()) / (float(np.percentile(own.numpy(), 99.5)) - own.min())
    inner = (slice(2, -2),) * 3
    np.testing.assert_allclose(written.get_fdata()[inner], expected.clamp(0, 1)[inner], atol=0.05)
    assert json.loads((tmp_path / "out" / "latents.json").read_text())["spacing_mm"] == [1, 1, 1]


# ---- channels ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_chosen_channels_are_trained_on_each_scaled_by_itself(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.nii.gz", (12, 10, 9, 3), seed=ord(name))
    for chosen in ((0,), (2, 0)):
        recipe = recipe_of(
            data=str(tmp_path), image_channels=chosen, perceptual="features", adversarial_weight=0.1
        )
        loaders = recipe.build_loaders(0, 1)
        batch = next(iter(loaders.train))
        loaders.close()
        assert batch["image"].shape == (2, len(chosen), 8, 8, 8)
        item = recipe._parts().training[0]
        image = recipe._steps()(item)["image"]
        assert image.amin(dim=(1, 2, 3)).tolist() == [0] * len(chosen)
        assert image.amax(dim=(1, 2, 3)).tolist() == [1] * len(chosen)
        own = load_volume(item["image"])[list(chosen)]
        ranks = [np.corrcoef(a.flatten(), b.flatten())[0, 1] for a, b in zip(image, own, strict=True)]
        assert min(ranks) > 0.99

        model, discriminator = recipe.build_model(), recipe.build_discriminator()
        assert discriminator is not None
        terms, seen = recipe.loss_against(discriminator, model, batch)
        assert recipe.discriminator_loss(discriminator, seen).isfinite()
        terms["loss"].backward()
        assert set(recipe.validate(model.eval(), batch)) == {"loss", "psnr_db"}
        result = recipe.result(model, CPU)
        said = "keep 128 numbers, trilinear sampling " + (
            "5^3 = 125" if len(chosen) == 1 else "2 x 4^3 = 128"
        )
        assert said in result["note"]


def test_channels_that_a_file_has_not_are_told_by_file(tmp_path: Path) -> None:
    one = write(tmp_path / "a.nii", (12, 10, 9))
    four = write(tmp_path / "b.nii", (12, 10, 9, 4))
    with pytest.raises(DataError) as caught:
        recipe_of(data=str(tmp_path), image_channels=(1, 5)).build_loaders(0, 1)
    assert str(caught.value).splitlines() == [
        f"{one}: has one channel, number 0, and image_channels names 1, 5. Name others, or leave it out",
        f"{four}: has 4 channels, numbers 0 to 3, and image_channels names 5. Name others, or leave it out",
    ]
    with pytest.raises(
        DataError, match=r"b\.nii: has 4 dimensions, 12 x 10 x 9 x 4\. .* channels in image_channels$"
    ):
        recipe_of(data=str(tmp_path)).build_loaders(0, 1)


def test_predicted_channels_are_a_file_of_four_dimensions(tmp_path: Path) -> None:
    path = write(tmp_path / "new.nii", (20, 16, 10, 3))
    recipe = recipe_of(data=str(path), image_channels=(2, 0), spacing=1, patch_size=(20, 24, 28))
    samples, problems = prediction.new_volumes(recipe.config, str(path))
    assert problems == []
    made = encoded(Kept(2).eval(), CPU, recipe.config, samples[0], tmp_path / "out")
    written = nibabel.load(made.files[1])
    assert written.shape == (20, 16, 10, 2)
    given = nibabel.load(path).get_fdata()
    inner = (slice(2, -2),) * 3
    for place, channel in enumerate((2, 0)):
        expected = given[..., channel][inner]
        low = expected < np.percentile(expected, 95)
        np.testing.assert_allclose(written.get_fdata()[..., place][inner][low], expected[low], rtol=0.02)


def test_settings_that_make_no_sense_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        train_config("autoencoder", data="x", spacing=(1, 1), image_channels=(0, 0))
    assert str(caught.value).splitlines() == [
        "spacing=(1.0, 1.0) must be one number, or three: to the right, front and top",
        "image_channels=(0, 0) names one twice",
    ]
    for name, value in (("spacing", 0), ("spacing", (1, 0, 1)), ("image_channels", (-1,))):
        with pytest.raises(ConfigError, match=rf"{name} = .* Give a value within"):
            train_config("autoencoder", data="x", **{name: value})
    with pytest.raises(ConfigError, match=r"spacing=1\.0 counts only with data other than 'phantoms'"):
        train_config("autoencoder", data="phantoms", spacing=1)


@pytest.mark.parametrize(
    ("image", "says"),
    [(torch.rand(1, 24, 16, 16), "too short for 2 parts"), (torch.zeros(1, 64, 16, 16), "part is empty")],
)
def test_a_volume_that_cannot_be_cut_says_which_fraction_to_leave_out(image: torch.Tensor, says: str) -> None:
    prepare = Prepare(VolumeReader(), (16, 16, 16), 0, val_fraction=0.0, test_fraction=0.2)
    with pytest.raises(DataError, match=f"{says}.*set test_fraction=0$"):
        prepare._cut(image, {"name": "a", "part": "test"})
