"""Volumes are written on the grid of the file that they come from."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from nbgpu.engine.data.volumes import load_volume, save_like

_TILTED = nibabel.affines.from_matvec(
    nibabel.eulerangles.euler2mat(0.2, -0.1, 0.3) @ np.diag([0.9, 1.1, 3.0]), [-80, 40, 7]
)
AFFINES = {
    "right, front, top": np.diag([2.0, 1.0, 1.5, 1.0]),
    "left, back, top": np.array([[-1.0, 0, 0, 90], [0, -1, 0, 126], [0, 0, 2, -72], [0, 0, 0, 1]]),
    "top, left, front": np.array([[0, -1.0, 0, 5], [0, 0, 1, 6], [2, 0, 0, 7], [0, 0, 0, 1]]),
    "tilted": _TILTED,
}


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("name", AFFINES)
def test_each_voxel_comes_back_to_its_place(tmp_path: Path, name: str, kind: type) -> None:
    values = np.random.default_rng(0).integers(-500, 1500, (5, 6, 7)).astype(np.int16)
    image = kind(values, AFFINES[name])
    image.header.set_xyzt_units("mm", "sec")
    image.set_qform(AFFINES[name], code=1)
    image.set_sform(AFFINES[name], code=4)
    image.header.set_slope_inter(0.5, 10.0)
    source, written = tmp_path / "given.nii.gz", tmp_path / "made.nii.gz"
    nibabel.save(image, source)
    volume = load_volume(source)
    save_like(volume, source, written)

    made, given = nibabel.load(written), nibabel.load(source)
    assert type(made) is kind
    assert made.get_data_dtype() == np.float32
    np.testing.assert_array_equal(made.get_fdata(), given.get_fdata())
    np.testing.assert_allclose(made.affine, given.affine, atol=1e-6)
    assert [int(made.header[code]) for code in ("qform_code", "sform_code")] == [1, 4]
    assert made.header.get_xyzt_units() == ("mm", "sec")
    torch.testing.assert_close(load_volume(written), volume, rtol=0, atol=0)


def test_one_of_four_volumes_in_a_file_is_three_dimensional(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 5, 6, 4)).astype(np.float32)
    source, written = tmp_path / "four.nii.gz", tmp_path / "one.nii.gz"
    nibabel.save(nibabel.Nifti1Image(values, AFFINES["left, back, top"]), source)
    save_like(load_volume(source)[2:3], source, written)
    np.testing.assert_array_equal(nibabel.load(written).get_fdata(dtype=np.float32), values[..., 2])


def test_a_volume_without_a_file_has_voxels_of_one_mm(tmp_path: Path) -> None:
    save_like(torch.ones(1, 2, 3, 4), None, tmp_path / "made.nii")
    made = nibabel.load(tmp_path / "made.nii")
    assert made.shape == (2, 3, 4)
    assert made.header.get_zooms() == (1, 1, 1)
