"""BraTS data on disk: the cases in a folder, the checks of their files, their voxels, and the cube that is
cut out of them for the network.

A file's name ends with its modality, in upper or lower case, after '-' or '_' ('_t1' does not match '_t1ce').
These are the names of BraTS, of its collections in TCIA and of BIDS:

- BraTS since 2023: BraTS-GLI-00000-000-{t1n,t1c,t2w,t2f,seg}.nii.gz; the last number counts visits
- BraTS before 2023: BraTS20_Training_001_{t1,t1ce,t2,flair,seg}.nii.gz
- BraTS-TCGA: TCGA-02-0006_1996.08.23_{t1,t1Gd,t2,flair,GlistrBoost_ManuallyCorrected}.nii.gz
- UPENN-GBM: UPENN-GBM-00001_11_{T1,T1GD,T2,FLAIR,segm}.nii.gz
- BIDS: sub-01_{T1w,ce-gadolinium_T1w,T2w,FLAIR}.nii.gz
- Task01 of the Medical Segmentation Decathlon: imagesTr/BRATS_001.nii.gz, with FLAIR, T1, T1 with contrast
  and T2 in one file
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import nibabel
import numpy as np
import torch
from monai.transforms import ResizeWithPadOrCrop, SpatialPad
from monai.transforms.utils import generate_spatial_bounding_box
from monai.utils import convert_to_tensor
from nibabel.arrayproxy import ArrayProxy
from torch import Tensor
from torch.nn import functional

from nbgpu.engine.data.volumes import READ_ERRORS, first_line, holds, load_volume
from nbgpu.errors import DataError
from nbgpu.machine.files import files_below

MODALITIES = ("t1n", "t1c", "t2w", "t2f")
_ENDINGS = {
    "t1n": ("t1n", "t1", "t1w"),
    "t1c": ("t1c", "t1ce", "t1gd", "ce-[a-z0-9]+_t1w"),
    "t2w": ("t2w", "t2"),
    "t2f": ("t2f", "flair"),
    "seg": ("seg", "segm", "glistrboost_manuallycorrected"),
}
"""The possible endings of the names of a modality's files, as regular expressions."""
_NAMES = {
    kind: re.compile(rf"(?P<case>.+?)[-_](?:{'|'.join(endings)})\.nii(?:\.gz)?", re.IGNORECASE)
    for kind, endings in _ENDINGS.items()
}
_BEFORE_2023 = {"t1n": "t1", "t1c": "t1ce", "t2w": "t2", "t2f": "flair"}
_SINCE_2023 = re.compile(r".+[-_](?:t1n|t1c|t2w|t2f)\.nii(?:\.gz)?", re.IGNORECASE)
"""The names of files with a modality in data sets since 2023."""
_VISIT = re.compile(r"(?P<patient>BraTS-.+)-\d{3}")
_TOGETHER = re.compile(r"(?P<case>[^.].*)\.nii(\.gz)?")
_CHANNELS = {"t2f": 0, "t1n": 1, "t1c": 2, "t2w": 3}
"""Channel of each modality in the Decathlon's files."""

CORE, OEDEMA, ENHANCING = 1, 2, 3
"""The labels of BraTS since 2023, to which all labels are converted."""
_FROM_DECATHLON = {1: OEDEMA, 2: CORE, 3: ENHANCING}
_FROM_OLD = {4: ENHANCING}
"""The conversion of labels from before 2023, which have no label 3."""


@dataclass
class Case:
    """A single visit of a patient."""

    name: str
    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    """The file of each modality and, if there is one, of 'seg'. The Decathlon has one file for all
    modalities."""

    @property
    def patient(self) -> str:
        """The name of the case without the number of the visit."""
        visit = _VISIT.fullmatch(self.name)
        return visit["patient"] if visit else self.name

    @property
    def is_in_one_file(self) -> bool:
        """Whether one file has all modalities, as in the Decathlon."""
        files = {self.files.get(name) for name in MODALITIES}
        return len(files) == 1 and None not in files


def file_ending(case: Case, kind: str) -> str:
    """Return the ending of a new file with a modality of the case: as '-t1c.nii.gz', or as '_t1ce.nii.gz' if
    '_' is before the modality in the names of the other files."""
    paths = [path for name, path in case.files.items() if name in MODALITIES]
    is_new = case.is_in_one_file or any(path.name.startswith(f"{case.name}-") for path in paths)
    return f"-{kind}.nii.gz" if is_new else f"_{_BEFORE_2023[kind]}.nii.gz"


# ---- finding -------------------------------------------------------------------------------------------


def find_cases(root: Path, needed: Sequence[str] = MODALITIES) -> tuple[list[Case], list[str]]:
    """Find the cases in a folder. Only names, headers and sizes of files are read, no voxels.

    Args:
        root: the folder.
        needed: the modalities that each case must have.

    Returns:
        (The cases without problems, a line for each problem.) Several cases of the same name are a problem,
        but are all returned.

    Raises:
        DataError: the folder does not exist or has no case.
    """
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder. data= takes 'phantoms' or a folder of BraTS")
    cases, problems = _decathlon(root) if (root / "imagesTr").is_dir() else _by_names(root)
    if not cases:
        raise DataError(
            f"{root}: has no files that are named as those of BraTS, such as CASE-t1n.nii.gz, CASE_t1.nii.gz or "
            "imagesTr/CASE.nii.gz"
        )
    folders_of = defaultdict(list)
    for case in cases:
        folders_of[case.name].append(str(case.folder))
    problems += [
        f"{name}: is in {len(folders)} folders, {', '.join(folders)}. Keep one of them"
        for name, folders in folders_of.items()
        if len(folders) > 1
    ]
    usable = []
    for case in cases:
        if wrong := list(_header_problems(case, needed)):
            problems += wrong
        else:
            usable.append(case)
    return usable, problems


def _by_names(root: Path) -> tuple[list[Case], list[str]]:
    """Find cases by the names of files in all subfolders: files of one folder whose names differ in the
    modality alone are a case. Return (the cases, a line for each modality that a case has twice)."""
    cases: dict[tuple[Path, str], Case] = {}
    problems = []
    for path in sorted(files_below(root)):
        matches = [
            (match["case"], kind)
            for kind, pattern in _NAMES.items()
            if (match := pattern.fullmatch(path.name))
        ]
        if not matches:
            continue
        # In BIDS 'sub-01_ce-gadolinium_T1w' also matches as a T1 without contrast, by '_T1w'. The right
        # pattern matches the longer ending, which leaves the shorter name of the case.
        name, kind = min(matches, key=lambda match: len(match[0]))
        case = cases.setdefault((path.parent, name), Case(name, path.parent))
        if kind in case.files:
            problems.append(
                f"{path}: {case.files[kind].name} is the same modality of the same case. Keep one"
            )
        case.files[kind] = path
    return list(cases.values()), problems


def _decathlon(root: Path) -> tuple[list[Case], list[str]]:
    """Find the cases of the Medical Segmentation Decathlon, which has one file in imagesTr with all
    modalities of a case, and the labels in labelsTr. Return (the cases, a line for each case that is there
    twice)."""
    cases: dict[str, Case] = {}
    problems = []
    for path in sorted((root / "imagesTr").iterdir()):
        match = _TOGETHER.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        name = match["case"]
        if name in cases:
            problems.append(f"{path}: {cases[name].files['t1n'].name} is the same case. Keep one")
        case = cases[name] = Case(name, path.parent, dict.fromkeys(MODALITIES, path))
        for suffix in (".nii", ".nii.gz"):
            if (labels := root / "labelsTr" / f"{name}{suffix}").is_file():
                case.files["seg"] = labels
    return list(cases.values()), problems


# ---- checking ------------------------------------------------------------------------------------------


def _header_problems(case: Case, needed: Sequence[str]) -> Iterator[str]:
    """Yield a message for the needed modalities that a case lacks, and for each file that cannot be read or
    has another grid than the case's first file. Only headers and file sizes are read."""
    if missing := [name for name in needed if name not in case.files]:
        yield f"{case.folder / case.name}: has no {' and no '.join(missing)}. Add the files, or take the case away"
    first: tuple[Path, tuple[int, ...], np.ndarray] | None = None
    for path in dict.fromkeys(case.files.values()):
        num_channels = 4 if case.is_in_one_file and path != case.files.get("seg") else 1
        header = _read_header(path, num_channels)
        if isinstance(header, str):
            yield f"{path}: {header}"
            continue
        shape, affine = header
        if first is None:
            first = path, shape, affine
        elif shape != first[1]:
            yield f"{path}: has {_by(shape)} voxels, and {first[0].name} has {_by(first[1])}. Resample one to the other"
        elif not np.allclose(affine, first[2], atol=1e-2):
            yield f"{path}: lies elsewhere than {first[0].name}: their affine matrices differ. Register them"


def _read_header(path: Path, num_channels: int) -> tuple[tuple[int, ...], np.ndarray] | str:
    """Read a NIfTI header. Return (the shape (D, H, W), the affine matrix (4, 4)), or a phrase that says what
    is wrong with the file."""
    try:
        image = nibabel.load(path)
        if not isinstance(image, nibabel.Nifti1Pair):
            return f"holds a {type(image).__name__}, not a NIfTI volume"
        dtype, shape = image.get_data_dtype(), tuple(int(n) for n in image.shape)
        if dtype.kind not in "iuf":
            return f"has voxels of type {dtype}, not numbers"
        if len(shape) < 3 or shape[3:] not in ([(4,)] if num_channels == 4 else [(), (1,)]):
            wanted = "four volumes, one for each modality" if num_channels == 4 else "one volume"
            return f"has the shape {_by(shape)}; it takes {wanted}"
        assert isinstance(image.dataobj, ArrayProxy)
        if not holds(path, image.dataobj.offset + int(np.prod(shape)) * dtype.itemsize):
            return "is truncated: it ends before its last voxel. Copy it again"
        return shape[:3], np.asarray(image.affine)
    except READ_ERRORS as error:
        return f"cannot be read as NIfTI ({first_line(error)}). Copy it again"


def voxel_problems(case: Case) -> list[str]:
    """Read all files of a case. Return a line for each file that is damaged, has NaN, is empty, or has
    unknown labels."""
    problems = []
    for load in (images, label):
        try:
            load(case)
        except DataError as error:
            problems += str(error).splitlines()
    return problems


def _by(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


# ---- voxels --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Modality:
    """One modality of a case, (1, D, H, W) with axes to the right, front and top."""

    image: Tensor
    """The voxels, scaled so that the two limits become -1 and 1, and clipped to that; the background is
    -1."""
    is_brain: Tensor
    """Whether the voxel has another value than 0 in the file."""
    limits: tuple[float, float]
    """The 1st and the 99th percentile of the nonzero voxels."""


def images(case: Case) -> dict[str, Tensor]:
    """Return each modality of the case as (1, D, H, W), with values from -1 to 1; the background is -1. D, H
    and W are the axes to the patient's right, front and top (RAS+).

    Raises:
        DataError: a line for each file that is damaged, has NaN, or has no contrast.
    """
    return {name: modality.image for name, modality in modalities(case).items()}


def modalities(case: Case) -> dict[str, Modality]:
    """Read the modalities that the case has, in the order of MODALITIES.

    Raises:
        DataError: a line for each file that is damaged, has NaN, or has no contrast.
    """
    by_name, problems = {}, []
    loaded: dict[Path, Tensor] = {}
    for name in MODALITIES:
        path = case.files.get(name)
        if path is None:
            continue
        try:
            if path not in loaded:
                loaded[path] = load_volume(path)
            volume, title = loaded[path], str(path)
            if case.is_in_one_file:
                volume, title = volume[_CHANNELS[name]][None], f"{path}, {name}"
            limits = intensity_limits(volume, title)
            by_name[name] = Modality(scaled(volume, *limits), volume != 0, limits)
        except READ_ERRORS as error:
            problems.append(_damaged(path, error))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return by_name


def intensity_limits(volume: Tensor, name: str) -> tuple[float, float]:
    """Return the 1st and the 99th percentile of the nonzero voxels of a volume.

    Args:
        volume: the voxels, of any shape.
        name: the name of the volume for messages.

    Raises:
        DataError: the volume has NaN or infinite voxels, is empty, or has no contrast.
    """
    if num_bad := int((~torch.isfinite(volume)).sum()):
        raise DataError(f"{name}: {num_bad} of {volume.numel()} voxels are NaN or infinite")
    brain = volume[volume != 0]
    if not len(brain):
        raise DataError(f"{name}: is empty: all its voxels are 0")
    # np.percentile, because torch.quantile takes at most 16 million values.
    low, high = (float(v) for v in np.percentile(brain.numpy(), [1, 99]))
    if low == high:
        raise DataError(f"{name}: has no contrast: 98 % of its voxels that are not 0 are {low:g}")
    return low, high


def scaled(volume: Tensor, low: float, high: float) -> Tensor:
    """Scale a volume linearly so that `low` becomes -1 and `high` becomes 1, and clip it to that range.
    Voxels that are 0, the background, become -1."""
    unit = ((volume - low) / (high - low)).clamp(0, 1)
    return torch.where(volume == 0, torch.zeros_like(unit), unit) * 2 - 1


def label(case: Case) -> Tensor | None:
    """Return the labels 0, CORE, OEDEMA and ENHANCING as (1, D, H, W) in int64, or None if the case has no
    labels.

    Raises:
        DataError: the file is damaged or has unknown labels.
    """
    path = case.files.get("seg")
    if path is None:
        return None
    try:
        values = load_volume(path)
    except READ_ERRORS as error:
        raise DataError(_damaged(path, error)) from None
    present = set(values.unique().tolist())
    is_new = any(_SINCE_2023.fullmatch(file.name) for file in case.files.values())
    allowed = {0, 1, 2, 3} if case.is_in_one_file or is_new or 3 in present else {0, 1, 2, 4}
    if wrong := sorted(present - allowed):
        listed = ", ".join(f"{value:g}" for value in wrong)
        raise DataError(
            f"{path}: has the label(s) {listed}. It takes 1, 2 and either 3 (since 2023) or 4 (before) for what enhances. "
            "In data after treatment (BraTS 2024) 4 is the cavity: make it 0"
        )
    # Files since 2023 have no 4, so that _FROM_OLD leaves their labels as they are.
    renamed: Mapping[int, int] = _FROM_DECATHLON if case.is_in_one_file else _FROM_OLD
    return torch.tensor([renamed.get(old, old) for old in range(5)])[values.long()]


def _damaged(path: Path, error: BaseException) -> str:
    return f"{path}: cannot be decoded ({type(error).__name__}: {first_line(error)}). Copy it again"


@dataclass(frozen=True)
class Cube:
    """The place of the cube in a case's volume.

    Args:
        shape: the shape (D, H, W) of the volume.
        box: the part of the volume that has the brain, as one slice for each axis.
        edge: the edge of the cube in voxels.
        fit: 'resize' to resample the box to the cube, 'crop' to cut its middle to the cube, or pad it.
    """

    shape: tuple[int, ...]
    box: tuple[slice, ...]
    edge: int
    fit: str

    @classmethod
    def around(cls, images: Tensor, edge: int, fit: str) -> Self:
        """Return the cube around all voxels of images (C, D, H, W) that are above -1, the background, in any
        channel."""
        box = generate_spatial_bounding_box(images, select_fn=lambda values: values > -1)
        slices = tuple(slice(start, end) for start, end in zip(*box, strict=True))
        return cls(tuple(images.shape[1:]), slices, edge, fit)

    def cut(self, volume: Tensor, background: float, mode: str) -> Tensor:
        """Return the cube (C, e, e, e) of a volume (C, D, H, W), resampled in torch's interpolation
        `mode`."""
        within = volume[(slice(None), *self.box)]
        if self.fit == "crop":
            return _plain(ResizeWithPadOrCrop(self.edge, constant_values=background)(within))
        cube = _plain(SpatialPad(max(within.shape[1:]), value=background)(within))
        return functional.interpolate(cube[None], size=(self.edge,) * 3, mode=mode)[0]

    def placed(self, cube: Tensor, background: float) -> Tensor:
        """Undo `cut`: put a cube (1, e, e, e) back into a volume (1, D, H, W) of the case's shape, with the
        background outside the cube. A resampled cube is resampled back trilinearly."""
        volume = torch.full((1, *self.shape), background, dtype=cube.dtype)
        within = volume[(slice(None), *self.box)]
        # A volume of the voxels' indices is cropped and padded as the image was. The result has the index of
        # the voxel that each position came from, however MONAI rounds. float64 holds every integer to 2^53.
        numbers = torch.arange(within.numel(), dtype=torch.float64).reshape(within.shape)
        if self.fit == "crop":
            moved, values = ResizeWithPadOrCrop(self.edge, constant_values=-1)(numbers), cube
        else:
            longest = max(within.shape[1:])
            moved = SpatialPad(longest, value=-1)(numbers)
            values = functional.interpolate(cube[None], size=(longest,) * 3, mode="trilinear")[0]
        source = _plain(moved).long()
        filled = within.flatten()
        filled[source[source >= 0]] = values[source >= 0]
        volume[(slice(None), *self.box)] = filled.reshape(within.shape)
        return volume


def _plain(image: Any) -> Tensor:
    """Return an image as a tensor without MONAI's metadata."""
    tensor: Tensor = convert_to_tensor(image, track_meta=False)
    return tensor
