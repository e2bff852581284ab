"""Volumes on disk: whether files are sound, their shapes, and their voxels, read and written.

Names, headers and file sizes are checked for every file before training; voxels (NaN, a constant volume,
damage inside the compressed data) when a volume is read.
"""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.transforms import Compose, EnsureChannelFirst, LoadImage, Orientation, ScaleIntensityRange
from monai.transforms.utils_pytorch_numpy_unification import percentile
from monai.utils import convert_to_tensor
from nibabel.arrayproxy import ArrayProxy
from nibabel.filebasedimages import ImageFileError
from nibabel.nifti2 import Nifti2Header
from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform
from nibabel.spatialimages import HeaderDataError
from torch import Tensor

from nbgpu.engine.data.spacing import affine_of, has_voxel_sizes, resampled_grid, shape_of
from nbgpu.errors import DataError
from nbgpu.planning import volume_files

_UPPER_PERCENTILE = 99.5
READ_ERRORS = (*volume_files.READ_ERRORS, ImageFileError, HeaderDataError)
"""The errors for a damaged file, with those of nibabel."""


def check_headers(
    paths: Sequence[Path],
    patch_size: int | Sequence[int],
    *,
    spacing_mm: Sequence[float] = (),
    channels: Sequence[int] | None = None,
) -> None:
    """Raise one DataError with a line for every file that is missing, damaged, not 3D or too small.

    This reads headers and file sizes only, about 1 ms for each file. A compressed file ends with the size of
    its content, so that a truncated file is found without unpacking it.

    Args:
        paths: the files.
        patch_size: the smallest number of voxels, along every axis or along each of those of `load_volume`.
        spacing_mm: the voxel size to which the files are resampled; none for their own.
        channels: the channels that are read of a file, as `header_problem` takes them.
    """
    problems = [
        f"{path}: {problem}"
        for path in dict.fromkeys(paths)
        if (problem := header_problem(path, patch_size, spacing_mm=spacing_mm, channels=channels))
    ]
    if problems:
        raise DataError("\n".join(problems))


def header_problem(
    path: Path,
    patch_size: int | Sequence[int] = 1,
    *,
    spacing_mm: Sequence[float] = (),
    channels: Sequence[int] | None = None,
) -> str | None:
    """Return the problem of a file that its name, header and size show; None if there is none.

    Args:
        path: the file.
        patch_size: the smallest number of voxels, along every axis or along each of those of `load_volume`.
        spacing_mm: the voxel size to which the file is resampled, along the same axes; none for its own.
        channels: the numbers of the channels that are read; empty for a file that must have one channel; None
            where channels cannot be chosen.
    """
    if not path.is_file():
        return "there is no such file. Correct the path, or take it out of the list"
    if not volume_files.is_nifti(path):
        return "not a NIfTI file by its name. Give .nii or .nii.gz files"
    try:
        image = nibabel.load(path)
    except READ_ERRORS as error:
        return f"cannot be read as NIfTI ({first_line(error)}). Copy or convert it again"
    if not isinstance(image, nibabel.Nifti1Pair):  # NIfTI-2 is a subclass
        return f"holds a {type(image).__name__}, not a NIfTI volume. Convert it"
    dtype = image.get_data_dtype()
    if dtype.kind not in "iuf":
        return f"has voxels of type {dtype}. Convert it to one number for each voxel"
    shape = image.shape
    if problem := _wrong_channels(shape, channels):
        return problem
    if spacing_mm and (problem := _wrong_voxel_size(image)):
        return f"{problem}. Correct it, or leave out spacing"
    if problem := _too_small(path, shape[:3], patch_size, spacing_mm):
        return problem
    # Not from the header, in which nibabel has cleared the offset.
    assert isinstance(image.dataobj, ArrayProxy), "no voxel is read yet"
    num_bytes = image.dataobj.offset + math.prod(shape) * dtype.itemsize
    if not holds(path, num_bytes):
        return "is truncated: it ends before its last voxel. Copy it again"
    return None


def _wrong_voxel_size(image: nibabel.Nifti1Pair) -> str | None:
    """Return the problem of the voxel size in a file's header, in mm; None if there is none."""
    unit = image.header.get_xyzt_units()[0]
    if unit in ("meter", "micron"):
        return f"says in its header that its voxels are measured in units of a {unit}, which is taken for mm"
    # The header is read again, because nibabel replaces a size of 0 by 1 when it opens a file.
    part = "header" if "header" in image.file_map else "image"
    with image.file_map[part].get_prepare_fileobj("rb") as file:
        header = type(image.header).from_fileobj(file, check=False)
    has_own_matrix = int(header["sform_code"]) > 0
    if not has_voxel_sizes(image.affine) or (not has_own_matrix and not all(header["pixdim"][1:4])):
        return "does not say in its header how large its voxels are"
    return None


def _wrong_channels(shape: Sequence[int], channels: Sequence[int] | None) -> str | None:
    """Return the problem of a file's number of dimensions or channels; None if there is none.

    Args:
        shape: the shape of the file: (x, y, z) or (x, y, z, channels) if it is good.
        channels: the numbers of the channels that are read; empty for a file that must have one channel; None
            where channels cannot be chosen.
    """
    if channels and len(shape) in (3, 4):
        num = shape[3] if len(shape) == 4 else 1
        missing = [str(channel) for channel in channels if channel >= num]
        if not num:
            return f"has no channel: {shape_in_words(shape)}"
        if missing:
            has = "one channel, number 0" if num == 1 else f"{num} channels, numbers 0 to {num - 1}"
            return f"has {has}, and image_channels names {', '.join(missing)}. Name others, or leave it out"
        return None
    if len(shape) == 3 or shape[3:] == (1,):
        return None
    if len(shape) < 3:
        return f"has {len(shape)} dimensions, {shape_in_words(shape)}: it is no volume"
    advice = ", or name its channels in image_channels" if len(shape) == 4 and channels is not None else ""
    return f"has {len(shape)} dimensions, {shape_in_words(shape)}. Take one 3D volume out of it{advice}"


def _too_small(
    path: Path, shape: Sequence[int], patch_size: int | Sequence[int], spacing_mm: Sequence[float]
) -> str | None:
    """Return the problem of a volume that is smaller than a patch, after resampling if there is a
    `spacing_mm`; None if it is large enough."""
    spacing = ""
    if spacing_mm:
        shape, _ = resampled_grid(shape_of(path), affine_of(path), spacing_mm)
        spacing = f" at a spacing of {shape_in_words(spacing_mm)} mm"
    edges = {patch_size} if isinstance(patch_size, int) else {*patch_size}
    # For a cubic patch only the shortest axis counts. So a file is accepted whose header does not say in
    # which directions its axes point.
    if len(edges) == 1:
        (edge,) = edges
        is_too_small, fits = min(shape) < edge, str(min(shape))
    else:
        assert not isinstance(patch_size, int)
        shape = shape if spacing_mm else shape_of(path)
        is_too_small = any(n < edge for n, edge in zip(shape, patch_size, strict=True))
        fits = f"{shape_in_words(shape)} (right, front, top)"
    if not is_too_small:
        return None
    advice = "take a smaller spacing" if spacing_mm else "resample it"
    return f"has {shape_in_words(shape)} voxels{spacing}, which is smaller than the patch. Set patch_size to at most {fits}, or {advice}"


def holds(path: Path, num_bytes: int) -> bool:
    """Return whether a file has at least this many bytes, after decompression."""
    if path.suffix.lower() != ".gz":
        return path.stat().st_size >= num_bytes
    with path.open("rb") as file:
        # A gzip member ends with the size of its content modulo 2^32 (RFC 1952).
        file.seek(-4, 2)
        (unpacked_bytes,) = struct.unpack("<I", file.read(4))
    if unpacked_bytes == num_bytes % 2**32:
        return True
    # Some sound files end otherwise, with several gzip members or with bytes after the last voxel: unpack
    # them.
    try:
        with gzip.open(path) as packed:
            while chunk := packed.read(2**20):
                num_bytes -= len(chunk)
    except READ_ERRORS:
        return False
    return num_bytes <= 0


def load_volume(path: Path, channels: Sequence[int] = ()) -> Tensor:
    """Return the voxels as float32 with axes (C, right, front, top), whatever the file's own axes are.

    C is 1 for a file of three dimensions. Of a file of four, all channels are read, or those that `channels`
    numbers, from 0.

    A compressed file is read twice: nibabel stops at the last voxel, before gzip's checksum, and would accept
    damaged voxels. Errors of gzip, nibabel and MONAI are raised unchanged; `Decode` turns them into messages.
    """
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as packed:
            while packed.read(2**20):
                pass
    load = Compose([LoadImage(), EnsureChannelFirst(), Orientation(axcodes="RAS", labels=None)])
    volume: Tensor = convert_to_tensor(load(path), track_meta=False)
    return volume[list(channels)] if channels else volume


def require_finite(image: Tensor, name: str) -> None:
    """Raise DataError for NaN or infinite voxels."""
    num_bad = int((~torch.isfinite(image)).sum())
    if num_bad:
        raise DataError(
            f"{name}: {num_bad} of {image.numel()} voxels are NaN or infinite. Replace them, for example with "
            "numpy.nan_to_num, or leave the file out"
        )


def intensity_range(image: Tensor, name: str) -> tuple[float, float]:
    """Return (the smallest value, the 99.5th percentile) of an image of any shape.

    Raises DataError for NaN or infinite voxels, or without contrast.
    """
    require_finite(image, name)
    low, high = (float(v) for v in np.asarray(percentile(image, [0.0, _UPPER_PERCENTILE])))
    if low == high:
        raise DataError(
            f"{name}: is constant: at least {_UPPER_PERCENTILE} % of its voxels are {low:g}. Leave the file out"
        )
    return low, high


def scale_intensity(image: Tensor, name: str) -> Tensor:
    """Map the smallest value of an image to 0 and the 99.5th percentile to 1, and clip larger values. Raises
    DataError for NaN or infinite voxels, or without contrast."""
    low, high = intensity_range(image, name)
    to_unit_range = ScaleIntensityRange(a_min=low, a_max=high, b_min=0.0, b_max=1.0, clip=True)
    scaled: Tensor = convert_to_tensor(to_unit_range(image), track_meta=False)
    return scaled


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


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
    # Scaling factors of integer voxels and the range of grey values to show belong to the old voxels.
    for name in ("scl_slope", "scl_inter", "cal_min", "cal_max"):
        header[name] = 0
    kind = nibabel.Nifti2Image if isinstance(header, Nifti2Header) else nibabel.Nifti1Image
    nibabel.save(kind(apply_orientation(voxels, back), image.affine, header), path)  # type: ignore[no-untyped-call]


Shape = tuple[int, int, int]


def shapes_of(
    paths: Iterable[Path], *, spacing_mm: Sequence[float] = (), channels: Sequence[int] | None = None
) -> list[Shape]:
    """Return the shapes (right, front, top) of the volumes as a recipe reads them.

    A file whose header is bad is left out: the check of the data reports it.

    Args:
        paths: the files.
        spacing_mm, channels: as `header_problem` takes them.

    Raises:
        DataError: no header is good; one line for each file.
    """
    problems = {path: header_problem(path, spacing_mm=spacing_mm, channels=channels) for path in paths}
    good = [path for path, problem in problems.items() if problem is None]
    if not good:
        raise DataError("\n".join(f"{path}: {problem}" for path, problem in problems.items()))
    if not spacing_mm:
        return [shape_of(path) for path in good]
    return [resampled_grid(shape_of(path), affine_of(path), spacing_mm)[0] for path in good]


def shape_in_words(shape: Iterable[float]) -> str:
    """Return a shape or voxel size as people write it: '240 x 240 x 155'."""
    return " x ".join(f"{size:g}" for size in shape)
