"""Resamples volumes to another voxel size, and back onto the grid that they came from.

The interpolation is linear and nothing is smoothed beforehand, as with MONAI's `Spacing` by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from monai.data.utils import compute_shape_offset, zoom_affine
from monai.transforms import Spacing, SpatialResample
from monai.utils import convert_to_tensor
from nibabel.affines import voxel_sizes
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform
from torch import Tensor


def resampled(volume: Tensor, affine: np.ndarray, spacing_mm: Sequence[float]) -> tuple[Tensor, np.ndarray]:
    """Return (the volume with voxels of another size, its affine matrix).

    Axes and rotation stay, and a shear is removed. The first voxel stays in its place in space; in a tilted
    volume its middle does. Voxels outside of the old volume get the value of the nearest old voxel. For a
    file: `resampled(load_volume(path), affine_of(path), (1.1, 1.1, 1.1))`.

    Args:
        volume: (C, D, H, W); every channel is resampled alike.
        affine: (4, 4), from voxels to mm, for the axes of `volume`.
        spacing_mm: the size of the new voxels in mm along each of the three axes.
    """
    resample = Spacing(pixdim=tuple(spacing_mm), mode="bilinear", padding_mode="border")
    result = resample(MetaTensor(volume, affine=torch.as_tensor(affine, dtype=torch.float64)))
    assert isinstance(result, MetaTensor)
    return _plain(result), np.asarray(result.affine, np.float64)


def resampled_grid(
    shape: Sequence[int], affine: np.ndarray, spacing_mm: Sequence[float]
) -> tuple[tuple[int, int, int], np.ndarray]:
    """Return the shape (D, H, W) and the affine matrix (4, 4) of a volume after `resampled`, without its
    voxels."""
    new_affine = zoom_affine(affine, np.asarray(spacing_mm, np.float64), diagonal=False)
    new_shape, new_affine[:3, 3] = compute_shape_offset(shape, affine, new_affine)
    first, second, third = (int(n) for n in new_shape)
    return (first, second, third), new_affine


def resampled_onto(
    volume: Tensor, affine: np.ndarray, shape: Sequence[int], target_affine: np.ndarray
) -> Tensor:
    """Return the volume (C, D, H, W) on another grid, in the same place in space, by linear interpolation.

    Args:
        volume: (C, D, H, W).
        affine: (4, 4), from its voxels to mm.
        shape: (D, H, W) of the grid.
        target_affine: (4, 4), from the grid's voxels to mm.
    """
    resample = SpatialResample(mode="bilinear", padding_mode="border")
    result = resample(
        MetaTensor(volume, affine=torch.as_tensor(affine, dtype=torch.float64)),
        dst_affine=torch.as_tensor(target_affine, dtype=torch.float64),
        spatial_size=tuple(shape),
    )
    return _plain(result)


def affine_of(path: Path) -> np.ndarray:
    """Return the affine matrix (4, 4) of a NIfTI file for the axes of `load_volume`, from its header."""
    image = _opened(path)
    to_right_front_top = ornt_transform(io_orientation(image.affine), axcodes2ornt("RAS"))
    affine: np.ndarray = image.affine @ inv_ornt_aff(to_right_front_top, image.shape[:3])
    return affine


def shape_of(path: Path) -> tuple[int, int, int]:
    """Return the number of voxels of a NIfTI file along the axes of `load_volume`, from its header.

    A file whose header does not say where its axes point has them in the order of the file.
    """
    image = _opened(path)
    if not has_voxel_sizes(image.affine):
        first, second, third = image.shape[:3]
        return first, second, third
    # For each axis of the file the axis of `load_volume` to which it belongs.
    axes = io_orientation(image.affine)[:, 0].astype(int)
    sizes = dict(zip(axes.tolist(), image.shape[:3], strict=True))
    return sizes[0], sizes[1], sizes[2]


def has_voxel_sizes(affine: np.ndarray) -> bool:
    """Return whether an affine matrix (4, 4) gives the size of the voxels: it is finite and can be
    inverted."""
    is_finite = bool(np.isfinite(affine).all())
    return is_finite and min(voxel_sizes(affine)) > 0 and abs(np.linalg.det(affine[:3, :3])) > 0


def _opened(path: Path) -> nibabel.Nifti1Pair:
    image = nibabel.load(path)
    assert isinstance(image, nibabel.Nifti1Pair)  # NIfTI-2 is a subclass
    return image


def _plain(volume: Tensor) -> Tensor:
    """Return a volume as a torch tensor in float32, without MONAI's metadata."""
    tensor: Tensor = convert_to_tensor(volume, dtype=torch.float32, track_meta=False)
    return tensor
