"""Volumes get another voxel size, and come back onto their own grid."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.transforms import Compose, EnsureChannelFirst, LoadImage, Orientation, Spacing

from nbgpu.engine.data.spacing import (
    affine_of,
    has_voxel_sizes,
    resampled,
    resampled_grid,
    resampled_onto,
    shape_of,
)
from nbgpu.engine.data.volumes import load_volume

_TILTED = nibabel.affines.from_matvec(
    nibabel.eulerangles.euler2mat(0.2, -0.1, 0.3) @ np.diag([0.9, 1.1, 3.0]), [-80, 40, 7]
)
AFFINES = {
    "right, front, top": np.diag([2.0, 1.0, 1.5, 1.0]),
    "left, back, top": np.array([[-1.0, 0, 0, 90], [0, -1.5, 0, 126], [0, 0, 2, -72], [0, 0, 0, 1]]),
    "top, left, front": np.array([[0, -1.0, 0, 5], [0, 0, 1.5, 6], [2, 0, 0, 7], [0, 0, 0, 1]]),
    "tilted": _TILTED,
}
SPACING_MM = (1.1, 0.7, 2.5)


def _in_mm(shape: tuple[int, ...], affine: np.ndarray) -> np.ndarray:
    """Return the position of each voxel, (3, D, H, W)."""
    return np.moveaxis(nibabel.affines.apply_affine(affine, np.moveaxis(np.indices(shape), 0, -1)), -1, 0)


def _file(folder: Path, affine: np.ndarray) -> Path:
    """Write a volume that is linear in the position in mm, so that interpolation changes nothing."""
    x, y, z = _in_mm((9, 10, 11), affine)
    image = nibabel.Nifti1Image((3 * x - 2 * y + z).astype(np.float32), affine)
    nibabel.save(image, folder / "given.nii.gz")
    return folder / "given.nii.gz"


@pytest.mark.parametrize("name", AFFINES)
def test_values_stay_where_they_are_in_mm(tmp_path: Path, name: str) -> None:
    path = _file(tmp_path, AFFINES[name])
    volume, affine = load_volume(path), affine_of(path)
    assert nibabel.aff2axcodes(affine) == ("R", "A", "S")
    assert shape_of(path) == volume.shape[1:]
    made, made_affine = resampled(volume, affine, SPACING_MM)
    shape, grid_affine = resampled_grid(shape_of(path), affine, SPACING_MM)
    assert made.shape[1:] == shape
    np.testing.assert_allclose(made_affine, grid_affine, atol=1e-6)
    assert type(made) is torch.Tensor
    assert made.dtype == torch.float32
    np.testing.assert_allclose(nibabel.affines.voxel_sizes(made_affine), SPACING_MM, rtol=1e-6)
    assert nibabel.aff2axcodes(made_affine) == ("R", "A", "S")
    if name != "tilted":
        np.testing.assert_allclose(made_affine[:3, 3], affine[:3, 3], atol=1e-6)
    # The outermost voxels may lie outside, where the border is repeated.
    inner = (slice(1, -1),) * 3
    x, y, z = _in_mm(tuple(made.shape[1:]), made_affine)
    expected = 3 * x - 2 * y + z
    np.testing.assert_allclose(made[0][inner], expected[inner], atol=2e-4)


@pytest.mark.parametrize("name", AFFINES)
def test_it_is_what_monai_makes_of_the_file(tmp_path: Path, name: str) -> None:
    path = _file(tmp_path, AFFINES[name])
    steps = [LoadImage(), EnsureChannelFirst(), Orientation(axcodes="RAS", labels=None), Spacing(SPACING_MM)]
    expected = Compose(steps)(path)
    made, affine = resampled(load_volume(path), affine_of(path), SPACING_MM)
    torch.testing.assert_close(made, expected.as_tensor(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(affine, expected.affine, atol=1e-6)


@pytest.mark.parametrize("name", AFFINES)
def test_a_volume_comes_back_onto_its_own_grid(tmp_path: Path, name: str) -> None:
    path = _file(tmp_path, AFFINES[name])
    volume, affine = load_volume(path), affine_of(path)
    made, made_affine = resampled(volume, affine, (0.5, 0.5, 0.5))
    back = resampled_onto(made, made_affine, tuple(volume.shape[1:]), affine)
    assert back.shape == volume.shape
    inner = (slice(None), *(slice(1, -1),) * 3)
    torch.testing.assert_close(back[inner], volume[inner], rtol=0, atol=2e-3)


def test_channels_are_resampled_alike() -> None:
    volume = torch.rand(2, 5, 6, 7)
    both, _ = resampled(volume, np.diag([1.0, 2, 3, 1]), (1.5, 1.5, 1.5))
    second, _ = resampled(volume[1:], np.diag([1.0, 2, 3, 1]), (1.5, 1.5, 1.5))
    assert both.shape == (2, 4, 8, 13)
    torch.testing.assert_close(both[1:], second)


def test_the_same_voxel_size_changes_nothing() -> None:
    volume = torch.rand(1, 5, 6, 7)
    made, affine = resampled(volume, np.diag([1.0, 2, 3, 1]), (1.0, 2.0, 3.0))
    torch.testing.assert_close(made, volume, rtol=0, atol=0)
    np.testing.assert_allclose(affine, np.diag([1.0, 2, 3, 1]))


def test_a_header_may_lack_voxel_sizes() -> None:
    assert has_voxel_sizes(np.diag([1.0, 2, 3, 1]))
    assert not has_voxel_sizes(np.diag([1.0, 0, 3, 1]))
    assert not has_voxel_sizes(np.diag([1.0, np.nan, 3, 1]))
