"""Folders of the notebook's host that another host does not see, and their copies there.

The ranks are given the paths of the notebook's host. On a host that does not see such a folder, its copy
stands in the cluster's private folder under the same path, so that paths between two folders are the same in
their copies. The notebook's side brings the files to and fro (client/engines/other_hosts/served.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nbgpu.protocol.cluster_processes import cluster_folder

COPIES = "served"
"""The folder of all copies, in the cluster's folder of a host."""
MARK = ".served"
"""A file in a copy, which tells it from the folders above it."""
RECEIVED = ".received"
"""A file in a checkpoint of a copy that has come from another host's copy."""


class Piece(NamedTuple):
    """A piece of a file in a served folder."""

    path: str
    """The file, relative to the folder."""
    offset_bytes: int
    """The position of the piece in the file. A piece at 0 replaces the file."""
    content: bytes
    is_last: bool
    """Whether the file ended there when the piece was read."""


class Changes(NamedTuple):
    """Files and checkpoints of a host that the notebook's host does not have yet, and those that are gone."""

    pieces: list[Piece]
    whole: list[str]
    """Checkpoints whose files have all been sent by now, relative to the folder."""
    gone: list[str]
    """Files and checkpoints, sent before in whole or in part, that have been removed there."""
    num_bytes_left: int
    """The bytes that are still to be sent."""
    work_s: float
    """The time that the host took to find this out."""


def copy_of(path: Path, folder: Path) -> Path:
    """The place of a path of the notebook's host in a cluster's folder of another host."""
    return folder / COPIES / path.relative_to(path.anchor)


def here(path: str | Path) -> Path:
    """The place of a path of the notebook's host on this rank's host: in a copy if the path's folder is
    served, and else the path itself."""
    path, folder = Path(path), cluster_folder()
    if folder is None or not path.is_absolute() or not (folder / COPIES).exists():
        return path
    copy = copy_of(path, folder)
    return copy if any((copy_of(each, folder) / MARK).exists() for each in (path, *path.parents)) else path


def is_copy(path: Path) -> bool:
    """Whether a path of this rank's host is in a copy."""
    folder = cluster_folder()
    return folder is not None and path.is_relative_to(folder / COPIES)


def original(path: str | Path) -> Path:
    """The path of the notebook's host for a path that is perhaps in a copy."""
    path, folder = Path(path), cluster_folder()
    if folder is None or not path.is_relative_to(folder / COPIES):
        return path
    return Path("/") / path.relative_to(folder / COPIES)
