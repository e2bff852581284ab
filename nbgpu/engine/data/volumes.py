"""Volumes on disk: which files a folder or a list names, whether they are sound, and their voxels.

Names, headers and file sizes are checked for every file before training; voxels (NaN, a constant volume,
damage inside the compressed data) when a volume is read.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.transforms import Compose, EnsureChannelFirst, LoadImage, Orientation, ScaleIntensityRange
from monai.transforms.utils_pytorch_numpy_unification import percentile
from monai.utils import convert_to_tensor
from nibabel.arrayproxy import ArrayProxy
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from torch import Tensor

from nbgpu.engine.data.spacing import affine_of, has_voxel_sizes, resampled_grid, shape_of
from nbgpu.errors import DataError

SUFFIXES = (".nii", ".nii.gz")
IMAGE_COLUMNS = ("image", "path", "file", "filename", "filepath", "nifti", "volume")
"""The possible headings of the column with the files of a CSV list; upper or lower case does not matter."""

READ_ERRORS = (OSError, EOFError, zlib.error, ImageFileError, HeaderDataError, ValueError, struct.error)
"""The errors of nibabel and gzip for a damaged file (BadGzipFile is an OSError)."""


# ---- finding -------------------------------------------------------------------------------------------


_PATIENT_IN_NAME = (
    re.compile(r"(?:^|[/\\\\])(sub-[A-Za-z0-9]+)"),  # BIDS: sub-01/anat/sub-01_T1w.nii.gz
    re.compile(r"(BraTS[A-Za-z0-9-]*?-[0-9]{5})-[0-9]{3}"),  # BraTS-GLI-00005-100/...-t1n.nii.gz
    re.compile(r"(BraTS[0-9]{2,4}_[A-Za-z_]*?[0-9]+)(?:_|$)"),  # BraTS20_Training_001_flair.nii
)
"""Where the names of public collections have the patient."""
_PATIENT_KEYS = ("patient", "patient_id", "subject", "subject_id")


@dataclass(frozen=True)
class VolumeList:
    """The files that a folder or a list names. `validation` and `test` are empty unless a list has these
    sections."""

    training: tuple[Path, ...]
    validation: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    patients: Mapping[Path, str] = field(default_factory=dict)
    """The patient of each file, as far as a list names them."""

    @property
    def everything(self) -> tuple[Path, ...]:
        """All files."""
        return (*self.training, *self.validation, *self.test)

    def patient_of(self, path: Path, pattern: str = "") -> str:
        """Return the patient of a file: what the pattern finds in its path, or what the list says, or what
        names of BIDS and BraTS say; otherwise the file is one of its own."""
        if pattern:
            found = re.search(pattern, str(path))
            return found[1] if found else str(path)
        if path in self.patients:
            return self.patients[path]
        matches = (known.search(str(path)) for known in _PATIENT_IN_NAME)
        return next((match[1] for match in matches if match), str(path))


def find_volumes(source: str) -> VolumeList:
    """Return the volumes that `source` names, each once, in a fixed order.

    `source` is a folder (searched with its subfolders for .nii and .nii.gz), one such file, a CSV list with
    one of IMAGE_COLUMNS as a heading, or a JSON list: of paths, of {"image": path}, or MONAI's and the
    Medical Segmentation Decathlon's {"training": [...], "validation": [...], "test": [...]}. A column or
    entry 'patient' names whose volume it is. Relative paths in a list are relative to the list's own folder.

    Raises DataError if `source` does not exist, names no volume, or is no such list.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        # sorted, because the order of a folder differs between file systems and would change each rank's
        # share
        found = VolumeList(tuple(sorted(p for p in path.rglob("*") if p.is_file() and _is_nifti(p))))
        if not found.training:
            raise DataError(f"{path}: the folder has no .nii or .nii.gz file. Give a folder that has some")
        return found
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such folder or file. data= takes a folder of NIfTI files, or a CSV or JSON "
            "list of them"
        )
    if _is_nifti(path):
        return VolumeList((path,))
    readers: dict[str, Callable[[Path], VolumeList]] = {".csv": _read_csv, ".json": _read_json}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: not a list that can be read. Give a .csv or .json file, or a folder")
    try:
        found = readers[path.suffix.lower()](path)
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:].upper()}: {error}") from None
    if not found.training:
        raise DataError(f"{path}: the list names no volume. Add at least one")
    return found


def _is_nifti(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def _read_csv(path: Path) -> VolumeList:
    # utf-8-sig, because spreadsheets write a byte-order mark, which would become part of the first heading
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        headings = list(rows.fieldnames or [])
        column = next((h for name in IMAGE_COLUMNS for h in headings if h.strip().lower() == name), None)
        if column is None:
            raise DataError(
                f"{path}: no column names the files. Its headings are: {', '.join(headings) or '(none)'}. "
                f"Call one of them: {', '.join(IMAGE_COLUMNS)}"
            )
        patient = next((h for key in _PATIENT_KEYS for h in headings if h.strip().lower() == key), None)
        entries = [
            (f"line {rows.line_num}", {"image": row[column], "patient": row[patient] if patient else None})
            for row in rows
        ]
    return VolumeList(_resolve(path, entries), patients=_patients(path, entries))


def _read_json(path: Path) -> VolumeList:
    content = json.loads(path.read_text(encoding="utf-8"))
    sections = content if isinstance(content, dict) and "training" in content else {"training": content}
    lists = {part: sections.get(part, []) for part in ("training", "validation", "test")}
    if not all(isinstance(entries, list) for entries in lists.values()):
        raise DataError(
            f"{path}: is neither a list nor an object with the lists 'training', 'validation' and 'test'. Write "
            '["a.nii.gz", ...], [{"image": "a.nii.gz"}, ...] or {"training": [...]}'
        )
    entries = {part: [(f"{part}[{i}]", entry) for i, entry in enumerate(own)] for part, own in lists.items()}
    found = {part: _resolve(path, own) for part, own in entries.items()}
    parts_of: dict[Path, list[str]] = {}
    for part, paths in found.items():
        for each in paths:
            parts_of.setdefault(each, []).append(part)
    twice = [
        f"{each}: is listed for {' and for '.join(parts)}. Keep one of them"
        for each, parts in sorted(parts_of.items())
        if len(parts) > 1
    ]
    if twice:
        raise DataError("\n".join(twice))
    return VolumeList(**found, patients=_patients(path, [pair for own in entries.values() for pair in own]))


def _patients(list_path: Path, entries: Sequence[tuple[str, Any]]) -> dict[Path, str]:
    """Return the patient of each file whose entry names one."""
    named = (entry for _, entry in entries if isinstance(entry, dict))
    found = (
        (entry["image"], next((entry[key] for key in _PATIENT_KEYS if entry.get(key)), None))
        for entry in named
    )
    return {
        list_path.parent / Path(image.strip()).expanduser(): str(patient).strip()
        for image, patient in found
        if patient
    }


def _resolve(list_path: Path, entries: Sequence[tuple[str, Any]]) -> tuple[Path, ...]:
    """Return the entries as paths, each once: a volume that is listed twice must not be in both parts of the
    data."""
    bad, paths = [], []
    for place, entry in entries:
        image = entry.get("image") if isinstance(entry, dict) else entry
        if isinstance(image, str) and image.strip():
            paths.append(list_path.parent / Path(image.strip()).expanduser())
        else:
            bad.append(f"{list_path}: {place} names no file. Give it a path, or take it out")
    if bad:
        raise DataError("\n".join(bad))
    return tuple(dict.fromkeys(paths))


# ---- checking ------------------------------------------------------------------------------------------


def check_headers(
    paths: Sequence[Path],
    patch_size: int | Sequence[int],
    *,
    spacing_mm: Sequence[float] = (),
    channels: Sequence[int] | None = None,
) -> None:
    """Raise one DataError with a line for every file that is missing, damaged, not 3D or too small; see
    `header_problem`.

    This reads headers and file sizes only, about 1 ms for each file. A compressed file ends with the size of
    its content, so that a truncated file is found without unpacking it.
    """
    found = {
        path: header_problem(path, patch_size, spacing_mm=spacing_mm, channels=channels) for path in paths
    }
    problems = [f"{path}: {problem}" for path, problem in found.items() if problem]
    if problems:
        raise DataError("\n".join(problems))


def header_problem(
    path: Path,
    patch_size: int | Sequence[int] = 1,
    *,
    spacing_mm: Sequence[float] = (),
    channels: Sequence[int] | None = None,
) -> str | None:
    """Return the problem of a file, as far as its name, header and size show; None if there is none.

    Args:
        path: the file.
        patch_size: the smallest number of voxels, along every axis or along each of those of `load_volume`.
        spacing_mm: the voxel size to which the file is resampled, along the same axes; none for its own.
        channels: the channels that are read of a file; none where it must have one. None where channels
            cannot be chosen.
    """
    if not path.is_file():
        return "there is no such file. Correct the path, or take it out of the list"
    if not _is_nifti(path):
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
    if spacing_mm and not has_voxel_sizes(image.affine):
        return "does not say in its header how large its voxels are. Correct it, or leave out spacing"
    if problem := _too_small(path, shape[:3], patch_size, spacing_mm):
        return problem
    assert isinstance(
        image.dataobj, ArrayProxy
    )  # no voxel is read yet; nibabel has cleared the offset in the header
    num_bytes = image.dataobj.offset + math.prod(shape) * dtype.itemsize
    if not holds(path, num_bytes):
        return "is truncated: it ends before its last voxel. Copy it again"
    return None


def _wrong_channels(shape: Sequence[int], channels: Sequence[int] | None) -> str | None:
    if channels and len(shape) in (3, 4):
        num = shape[3] if len(shape) == 4 else 1
        missing = [str(channel) for channel in channels if channel >= num]
        if missing:
            has = "one channel, number 0" if num == 1 else f"{num} channels, numbers 0 to {num - 1}"
            return f"has {has}, and image_channels names {', '.join(missing)}. Name others, or leave it out"
        return None
    if len(shape) == 3 or shape[3:] == (1,):
        return None
    advice = ", or name its channels in image_channels" if len(shape) == 4 and channels is not None else ""
    return f"has {len(shape)} dimensions, {_by(shape)}. Take one 3D volume out of it{advice}"


def _too_small(
    path: Path, shape: Sequence[int], patch_size: int | Sequence[int], spacing_mm: Sequence[float]
) -> str | None:
    at = ""
    if spacing_mm:
        shape, _ = resampled_grid(shape_of(path), affine_of(path), spacing_mm)
        at = f" at a spacing of {' x '.join(f'{size:g}' for size in spacing_mm)} mm"
    edges = {patch_size} if isinstance(patch_size, int) else {*patch_size}
    if len(edges) == 1:
        (edge,) = edges
        is_too_small, fits = min(shape) < edge, str(min(shape))
    else:
        assert not isinstance(patch_size, int)
        shape = shape if spacing_mm else shape_of(path)
        is_too_small = any(n < edge for n, edge in zip(shape, patch_size, strict=True))
        fits = f"{_by(shape)} (right, front, top)"
    if not is_too_small:
        return None
    advice = "take a smaller spacing" if spacing_mm else "resample it"
    return f"has {_by(shape)} voxels{at}, which is smaller than the patch. Set patch_size to at most {fits}, or {advice}"


def holds(path: Path, num_bytes: int) -> bool:
    """Whether the file has at least this many bytes, unpacked."""
    if path.suffix.lower() != ".gz":
        return path.stat().st_size >= num_bytes
    with path.open("rb") as file:
        file.seek(-4, 2)
        (unpacked_bytes,) = struct.unpack("<I", file.read(4))
    if unpacked_bytes == num_bytes % 2**32:
        return True
    # Some sound files have another ending: several gzip members in a row, or bytes after the last voxel.
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


def intensity_range(image: Tensor, name: str, upper_percentile: float = 99.5) -> tuple[float, float]:
    """Return (the smallest value, the upper percentile) of an image of any shape.

    Raises DataError for NaN or infinite voxels, or without contrast.
    """
    require_finite(image, name)
    low, high = (float(v) for v in np.asarray(percentile(image, [0.0, upper_percentile])))
    if low == high:
        raise DataError(
            f"{name}: is constant: at least {upper_percentile} % of its voxels are {low:g}. Leave the file out"
        )
    return low, high


def scale_intensity(image: Tensor, name: str, upper_percentile: float = 99.5) -> Tensor:
    """Map the smallest value to 0 and the upper percentile to 1, and clip larger values; see
    `intensity_range`."""
    low, high = intensity_range(image, name, upper_percentile)
    to_unit_range = ScaleIntensityRange(a_min=low, a_max=high, b_min=0.0, b_max=1.0, clip=True)
    scaled: Tensor = convert_to_tensor(to_unit_range(image), track_meta=False)
    return scaled


def _by(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
