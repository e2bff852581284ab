"""The files of volumes in a folder or a list, found without torch."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbgpu.errors import DataError
from nbgpu.machine.files import files_below
from nbgpu.planning.csv_rows import read_csv

SUFFIXES = (".nii", ".nii.gz")
READ_ERRORS = (OSError, EOFError, ValueError, TypeError, struct.error, zlib.error)
"""The errors of nibabel, numpy and gzip for a damaged file (BadGzipFile is an OSError), without nibabel's own
classes, whose import takes long."""
_OTHER_SUFFIXES = (".dcm", ".ima", ".hdr", ".img", ".mgz", ".mgh", ".nrrd", ".mha", ".mhd")
IMAGE_COLUMNS = ("image", "path", "file", "filename", "filepath", "nifti", "volume")
"""The possible headings of the column with the files of a CSV list; upper or lower case does not matter."""

_PATIENT_IN_NAME = (
    re.compile(r"(?:^|[/\\])(sub-[A-Za-z0-9]+)"),  # BIDS: sub-01/anat/sub-01_T1w.nii.gz
    re.compile(r"(BraTS[A-Za-z0-9-]*?-[0-9]{5})-[0-9]{3}"),  # BraTS-GLI-00005-100/...-t1n.nii.gz
    re.compile(r"(BraTS[0-9]{2,4}_[A-Za-z_]*?[0-9]+)(?:_|$)"),  # BraTS20_Training_001_flair.nii
)
"""The patient in the names of files of public collections."""
_PATIENT_KEYS = ("patient", "patient_id", "subject", "subject_id")


@dataclass(frozen=True)
class VolumeList:
    """The volumes in a folder or a list. `validation` and `test` are empty unless a list has these
    sections."""

    training: tuple[Path, ...]
    validation: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    patients: Mapping[Path, str] = field(default_factory=dict)
    """The patient of each file for which a list names one."""
    passed_over: str = ""
    """A sentence about the images of other formats in a folder, which are not read; empty for none."""

    @property
    def everything(self) -> tuple[Path, ...]:
        """All files."""
        return (*self.training, *self.validation, *self.test)

    def patient_of(self, path: Path, pattern: str = "") -> str:
        """Return the patient of a file: with a pattern its first group, else as the list says, else as the
        names of BIDS and BraTS have it. Each file without any of these is a patient of its own."""
        if not pattern and path in self.patients:
            return self.patients[path]
        matches = (re.search(one, str(path)) for one in ([pattern] if pattern else _PATIENT_IN_NAME))
        return next((match[1] for match in matches if match and match[1]), str(path))


def find_volumes(source: str) -> VolumeList:
    """Return the volumes of a folder, file or list, each once and in a fixed order.

    `source` is a folder (searched with its subfolders for .nii and .nii.gz), one such file, a CSV list with
    one of IMAGE_COLUMNS as a heading, or a JSON list: of paths, of {"image": path}, or MONAI's and the
    Medical Segmentation Decathlon's {"training": [...], "validation": [...], "test": [...]}. A column or
    entry 'patient' names whose volume it is. Relative paths in a list are relative to the list's own folder.

    Raises:
        DataError: `source` does not exist, names no volume, or is no such list.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such folder or file. data= takes a folder of NIfTI files, or a CSV or JSON "
            "list of them"
        )
    if is_nifti(path):
        return VolumeList((path,))
    readers: dict[str, Callable[[Path], VolumeList]] = {".csv": _read_csv, ".json": _read_json}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: not a list that can be read. Give a .csv or .json file, or a folder")
    try:
        volumes = readers[path.suffix.lower()](path)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:].upper()}: {error}") from None
    if not volumes.training:
        raise DataError(f"{path}: the list names no volume. Add at least one")
    return volumes


def _read_folder(folder: Path) -> VolumeList:
    """Return the NIfTI files in a folder and its subfolders, with a note about images of other formats.

    Raises:
        DataError: there is no NIfTI file.
    """
    # Hidden files are left out: a Mac writes '._scan.nii.gz' beside each 'scan.nii.gz' on other file systems.
    files = list(files_below(folder))
    # Sorted, because the order of files differs between file systems, and decides the share of each rank.
    volumes = tuple(sorted(path for path in files if is_nifti(path)))
    others = sorted(path for path in files if _is_other_image(path))
    advice = (
        f" {len(others)} file(s) are images of other formats, such as {others[0].name}. Convert them: DICOM with dcm2niix, "
        "others with nibabel"
        if others
        else ""
    )
    if not volumes:
        raise DataError(
            f"{folder}: the folder has no .nii or .nii.gz file.{advice or ' Give a folder that has some'}"
        )
    return VolumeList(volumes, passed_over=f"{folder}:{advice}" if others else "")


def _is_other_image(path: Path) -> bool:
    """Return whether a file is an image of a format that is not read: by its name, or as DICOM by its first
    bytes, because scanners write DICOM files without a suffix."""
    name = path.name.lower()
    if name.endswith(_OTHER_SUFFIXES):
        return True
    # Names of DICOM files often end with a number, such as 'IM.0001'.
    if path.suffix and not path.suffix[1:].isdigit():
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def is_nifti(path: Path) -> bool:
    """Return whether a file is a NIfTI volume by its name."""
    return path.name.lower().endswith(SUFFIXES)


def _read_csv(path: Path) -> VolumeList:
    """Read a list of volumes from a CSV file, with the patient of each if a column names them."""
    table = read_csv(path)
    column, patient = table.heading(*IMAGE_COLUMNS), table.heading(*_PATIENT_KEYS)
    if column is None:
        raise DataError(
            f"{path}: no column names the files. Its headings are: {', '.join(table.headings) or '(none)'}. "
            f"Call one of them: {', '.join(IMAGE_COLUMNS)}"
        )
    entries = [
        (f"line {number}", {"image": row[column], "patient": row[patient] if patient else None})
        for number, row in table.rows
    ]
    volumes, patients = _resolve(path, entries)
    return VolumeList(volumes, patients=patients)


def _read_json(path: Path) -> VolumeList:
    """Read a list of volumes from JSON: of paths, of objects, or of such lists for training, validation and
    test.

    Raises:
        DataError: the file has another form, or a volume is in two parts.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    sections = content if isinstance(content, dict) and "training" in content else {"training": content}
    lists = {part: sections.get(part, []) for part in ("training", "validation", "test")}
    if not all(isinstance(entries, list) for entries in lists.values()):
        raise DataError(
            f"{path}: is neither a list nor an object with the lists 'training', 'validation' and 'test'. Write "
            '["a.nii.gz", ...], [{"image": "a.nii.gz"}, ...] or {"training": [...]}'
        )
    volumes_of: dict[str, tuple[Path, ...]] = {}
    patients: dict[Path, str] = {}
    for part, entries in lists.items():
        named = [(f"{part}[{i}]", entry) for i, entry in enumerate(entries)]
        volumes_of[part], patients_of_part = _resolve(path, named)
        patients |= patients_of_part
    parts_of: dict[Path, list[str]] = {}
    for part, volumes in volumes_of.items():
        for volume in volumes:
            parts_of.setdefault(volume, []).append(part)
    repeated = [
        f"{volume}: is listed for {' and for '.join(parts)}. Keep one of them"
        for volume, parts in sorted(parts_of.items())
        if len(parts) > 1
    ]
    if repeated:
        raise DataError("\n".join(repeated))
    training, validation, test = volumes_of.values()
    return VolumeList(training, validation, test, patients)


def _resolve(list_path: Path, entries: Sequence[tuple[str, Any]]) -> tuple[tuple[Path, ...], dict[Path, str]]:
    """Resolve the entries of a list of volumes.

    Args:
        list_path: the file of the list; paths in it are relative to its folder.
        entries: (name of the entry for messages, path or mapping with the key 'image') of each entry.

    Returns:
        (The paths, each once, so that a volume that is listed twice is not in two parts of the data; the
        patient of each file whose entry names one.)
    """
    bad, paths, patients = [], [], {}
    for place, entry in entries:
        fields = entry if isinstance(entry, dict) else {"image": entry}
        image = fields.get("image")
        if not (isinstance(image, str) and image.strip()):
            bad.append(f"{list_path}: {place} names no file. Give it a path, or take it out")
            continue
        path = list_path.parent / Path(image.strip()).expanduser()
        paths.append(path)
        if patient := next((fields[key] for key in _PATIENT_KEYS if fields.get(key)), None):
            patients[path] = str(patient).strip()
    if bad:
        raise DataError("\n".join(bad))
    return tuple(dict.fromkeys(paths)), patients
