"""Volumes at one voxel size: 8 mm are as many voxels in every volume, whatever the voxels of its file are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from nbgpu.config import train_config
from nbgpu.engine.data.decoding import Decode, Item
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.patients import Scale, load_patients
from nbgpu.recipes.survival.prediction import new_patients
from nbgpu.recipes.survival.prepare import cut_in_words
from nbgpu.recipes.survival.recipe import Survival

RADIUS_MM = 8.0


def config(**settings: Any) -> SurvivalConfig:
    found = train_config("survival", **{"data": "cohort.csv", "image_size": (32, 32, 32), **settings})
    assert isinstance(found, SurvivalConfig)
    return found


def ball(
    path: Path, voxel_mm: tuple[float, float, float], extent_mm: float = 48.0, flip: bool = False
) -> Path:
    """Write a ball of `RADIUS_MM` and 500 Hounsfield units in the middle of air."""
    shape = [round(extent_mm / mm) for mm in voxel_mm]
    along = [(np.arange(n) - (n - 1) / 2) * mm for n, mm in zip(shape, voxel_mm, strict=True)]
    distance = np.sqrt(sum(axis**2 for axis in np.meshgrid(*along, indexing="ij")))
    voxels = np.where(distance <= RADIUS_MM, 500.0, -1000.0).astype(np.float32)
    affine = np.diag([*voxel_mm, 1.0])
    if flip:
        affine[0] *= -1
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    return path


def decoded(path: Path, **settings: Any) -> torch.Tensor:
    item: Item = {"name": path.name, "image": path, "features": (), "order": 0, "event": 1, "number": 0}
    found = Decode(Survival(config(**settings))._steps())(item)
    if "failure" in found:
        raise found["failure"]
    image: torch.Tensor = found["image"]
    return image[0]


def ball_mm3(image: torch.Tensor, voxel_mm3: float) -> float:
    return float((image > 0.375).sum()) * voxel_mm3


@pytest.mark.parametrize(
    ("voxel_mm", "flip"), [((1, 1, 1), False), ((0.8, 0.8, 2), True), ((2, 1.5, 1), False)]
)
def test_a_ball_keeps_its_size_in_mm_and_its_place(
    tmp_path: Path, voxel_mm: tuple[float, float, float], flip: bool
) -> None:
    path = ball(tmp_path / "ball.nii.gz", voxel_mm, flip=flip)
    true_mm3 = 4 / 3 * np.pi * RADIUS_MM**3
    for spacing, voxel_mm3 in (((1.0,), 1.0), ((1.5, 1.5, 2.0), 4.5)):
        image = decoded(path, spacing=spacing)
        assert image.shape == (32, 32, 32)
        assert ball_mm3(image, voxel_mm3) == pytest.approx(true_mm3, rel=0.15)
        inside = (image > 0.375).nonzero().double()
        # The middle of an even number of voxels lies between two of them.
        assert (inside.mean(dim=0) - 15.5).abs().max() < 1.1
    # Without a spacing it is as large as the file's voxels make it.
    assert decoded(path).shape == (32, 32, 32)


def test_a_smaller_volume_is_filled_up_with_air_and_a_larger_one_is_cut(tmp_path: Path) -> None:
    small = decoded(ball(tmp_path / "small.nii", (1, 1, 1), extent_mm=20), spacing=(1,))
    assert small[:5].max() == 0
    assert small[:, :, -5:].max() == 0
    assert small[16, 16, 16] == pytest.approx(0.75)
    large = decoded(ball(tmp_path / "large.nii", (1, 1, 1), extent_mm=90), spacing=(1,))
    assert ball_mm3(large, 1.0) == pytest.approx(4 / 3 * np.pi * RADIUS_MM**3, rel=0.15)


def test_a_middle_without_contrast_is_refused(tmp_path: Path) -> None:
    path = ball(tmp_path / "ball.nii", (1, 1, 1))
    image = nibabel.load(path)
    voxels = np.full(image.shape, -1000.0, np.float32)
    voxels[0, 0, 0] = 500
    nibabel.save(nibabel.Nifti1Image(voxels, image.affine), path)
    with pytest.raises(DataError, match=r"ball.nii: its middle of image_size voxels has no contrast"):
        decoded(path, spacing=(1,))
    assert decoded(path).max() > 0


def test_the_cache_knows_volumes_of_another_voxel_size_apart() -> None:
    prints = {
        Decode(Survival(config(**settings))._steps()).fingerprint()
        for settings in ({}, {"spacing": (1.0,)}, {"spacing": (1.5,)}, {"spacing": (1.0, 1.0, 1.0)})
    }
    assert len(prints) == 3


def test_settings_that_are_no_voxel_size_are_refused() -> None:
    assert config(spacing=1.5).spacing_mm == (1.5, 1.5, 1.5)
    for spacing in ((0.0,), (1.0, 2.0), (-1.0,), (1.0, 1.0, 500.0)):
        with pytest.raises(ConfigError, match=r"must be one number or three, from 0\.05 to 100 mm"):
            config(spacing=spacing)
    with pytest.raises(ConfigError, match=r"spacing=.* counts only with data other than"):
        train_config("survival", spacing=(1.0,))


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    lines = ["image,time,event"]
    for index in range(8):
        name = f"{index}.nii.gz"
        ball(tmp_path / name, (1, 1, 1), extent_mm=40 if index < 5 else 24)
        lines.append(f"{name},{index + 1},1")
    (tmp_path / "cohort.csv").write_text("\n".join(lines))
    return tmp_path / "cohort.csv"


def without_voxel_size(path: Path) -> None:
    image = nibabel.load(path)
    assert isinstance(image, nibabel.Nifti1Image)
    image.header.set_sform(np.diag([0, 1, 1, 1.0]), code=1)
    image.header.set_qform(None, code=0)
    nibabel.save(nibabel.Nifti1Image(image.get_fdata(), None, image.header), path)


def test_a_file_that_does_not_say_how_large_its_voxels_are_is_refused_with_its_line(cohort: Path) -> None:
    path = ball(cohort.with_name("unknown.nii"), (1, 1, 1))
    without_voxel_size(path)
    cohort.write_text(cohort.read_text().replace("3.nii.gz", "unknown.nii"))
    with pytest.raises(
        DataError, match=r"line 5: .*unknown.nii: does not say in its header how large"
    ) as caught:
        load_patients(config(data=str(cohort), spacing=(1.0,)))
    assert "leave out spacing" in str(caught.value)
    _, problems = new_patients(
        config(data=str(cohort), spacing=(1.0,)), Scale(np.empty(0), np.empty(0)), str(cohort)
    )
    assert ["line 5" in problem for problem in problems] == [True]
    load_patients(config(data=str(cohort)))


def test_how_many_volumes_lose_their_edges_is_said(cohort: Path) -> None:
    settings = config(data=str(cohort), spacing=(1.0,))
    assert cut_in_words(load_patients(settings).items, settings) == (
        "voxels of 1 x 1 x 1 mm: the middle 32 x 32 x 32 mm of each volume. 5 of the 8 that were looked at lose their edges: "
        "they are up to 40 x 40 x 40 mm"
    )
    settings = config(data=str(cohort), spacing=(1.5,))
    assert cut_in_words(load_patients(settings).items, settings).endswith(
        "the middle 48 x 48 x 48 mm of each volume, and none of the 8 that were looked at is larger"
    )
