"""Writes volumes on the grid of the file that they belong to."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
from nibabel.nifti2 import Nifti2Header
from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform
from torch import Tensor


def save_like(volume: Tensor, source: Path | None, path: Path) -> None:
    """Write a volume as NIfTI in float32, voxel by voxel on the grid of another file.

    Args:
        volume: (C, right, front, top), with the axes of `load_volume`. Several channels become the fourth
            dimension of the file.
        source: the file from which a volume with these axes was read: its order and direction of axes, its
            affine matrices with their codes, and its units are kept. None for a volume that has no file: it
            gets voxels of 1 mm.
        path: the file to write, .nii or .nii.gz.
    """
    voxels = (volume[0] if len(volume) == 1 else volume.movedim(0, -1)).cpu().float().numpy()
    if source is None:
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)
        return
    image = nibabel.load(source)
    assert isinstance(image, nibabel.Nifti1Pair)
    back = ornt_transform(axcodes2ornt("RAS"), io_orientation(image.affine))
    header = image.header.copy()
    header.set_data_dtype(np.float32)
    # These say how to read integers, and which grey values to show.
    for name in ("scl_slope", "scl_inter", "cal_min", "cal_max"):
        header[name] = 0
    kind = nibabel.Nifti2Image if isinstance(header, Nifti2Header) else nibabel.Nifti1Image
    nibabel.save(kind(apply_orientation(voxels, back), image.affine, header), path)  # type: ignore[no-untyped-call]
