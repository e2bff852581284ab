"""The folder of saved variables: its files, their integrity, and the variables that each rank saved.

    manifest.json              the variables, ranks, sizes and hashes of the files, and the data folder
    data-3f2a91c0/rank-0/      variables.json    the structure of the values, as JSON
                               tensors.safetensors
                               pickled.bin       values that had to be pickled; often missing

The manifest is replaced atomically when everything that it names is on the disk, so that the folder always
has exactly one complete save. This module does not import torch, so that the notebook can use it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbgpu.errors import DataError
from nbgpu.machine.files import write_whole

MANIFEST, VALUES, TENSORS, PICKLED = "manifest.json", "variables.json", "tensors.safetensors", "pickled.bin"
_FORMAT = 1
_DATA = re.compile(r"data-[0-9a-f]{8}")


@dataclass(frozen=True)
class SavedFile:
    """The size and the hash of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class RankSaved:
    """The files and variables that one rank has saved."""

    files: Mapping[str, SavedFile]
    """The files by their name in the rank's folder."""
    fingerprints: Mapping[str, str]
    """A hash of each variable, by name. Equal hashes mean equal values."""
    refused: Sequence[str] = ()
    """A line for each variable, or part of one, that could not be saved."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    data: str
    """The name of the folder with the ranks' files."""
    time_s: float
    """The time of the save, in seconds since the epoch."""
    ranks: Sequence[RankSaved]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def names(self) -> list[str]:
        """Return the variables that at least one rank has saved."""
        return sorted({name for rank in self.ranks for name in rank.fingerprints})

    def is_equal_everywhere(self, name: str) -> bool:
        """Return whether all ranks saved a variable with the same value."""
        return len({rank.fingerprints.get(name, "") for rank in self.ranks}) == 1


def rank_folder(folder: Path, data: str, rank: int) -> Path:
    return folder / data / f"rank-{rank}"


def new_data() -> str:
    """Return a new name for the folder with the ranks' files."""
    return f"data-{secrets.token_hex(4)}"


def require_saved_or_new(folder: Path) -> None:
    """Raise DataError unless variables may be saved into this folder: it is new, empty or has saved ones."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder} is a file. Name a folder for the variables")
    others = [path.name for path in folder.iterdir() if not _is_ours(path.name)]
    if others:
        raise DataError(
            f"{folder} has other files, such as {others[0]}, and saving replaces what is in a folder. Name a new one"
        )


def publish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whose data are already on the disk, and remove earlier data.

    Raises:
        OSError: the manifest could not be written; the folder still has its previous content.
    """
    write_whole(folder / MANIFEST, _text(manifest), outlasts_power_cut=True)
    discard_all_but(folder, manifest.data)


def discard_all_but(folder: Path, data: str) -> None:
    """Remove the data of other saves, also of incomplete ones."""
    for path in folder.iterdir():
        if _DATA.fullmatch(path.name) and path.name != data:
            shutil.rmtree(path, ignore_errors=True)


def read(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        DataError: there are no saved variables in the folder, or its manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        reason = "there is no such folder" if not folder.exists() else f"it has no {MANIFEST}"
        raise DataError(f"{folder} has no saved variables: {reason}")
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        sha256 = fields.pop("sha256")
        if fields["format"] != _FORMAT:
            raise DataError(
                f"{path} is of format {fields['format']}, and this nbgpu reads format {_FORMAT}. Save the variables again"
            )
        if sha256 != _sha256_of(fields) or not _DATA.fullmatch(fields["data"]):
            raise DataError(f"{path} is damaged (its sha256 differs). Take another save")
        return Manifest(
            fields["data"],
            float(fields["time_s"]),
            [
                RankSaved(
                    {name: SavedFile(**file) for name, file in rank["files"].items()},
                    rank["fingerprints"],
                    rank["refused"],
                )
                for rank in fields["ranks"]
            ],
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except (AttributeError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path} is not what nbgpu writes. Take another save") from None


def damage(folder: Path, saved: RankSaved) -> str:
    """Return a sentence on the first missing or damaged file of a rank; empty if all are intact.

    Args:
        folder: the rank's folder.
        saved: the files that the rank has saved there.
    """
    for name, file in saved.files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            return f"{path} has {size_bytes} bytes and should have {file.size_bytes}"
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                return f"{path} is damaged (its sha256 differs)"
    return ""


def _is_ours(name: str) -> bool:
    """Return whether a file or folder of this name belongs to saved variables."""
    return name in (MANIFEST, "lock") or name.startswith(f".{MANIFEST}.") or bool(_DATA.fullmatch(name))


def _text(manifest: Manifest) -> str:
    fields = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({**fields, "sha256": _sha256_of(fields)}, indent=2) + "\n"


def _sha256_of(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
