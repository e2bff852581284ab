"""Served folders: folders of the notebook's host that another host cannot access, and their copies there.

The ranks get the paths of the notebook's host. On a host without access to such a folder, a copy of the
folder is in the cluster's private folder under the same path, so that relative paths between two folders stay
the same. The notebook's side synchronises the files (client/engines/other_hosts/served.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nbgpu.protocol.cluster_processes import cluster_folder

COPIES = "served"
"""The folder of all copies, in the cluster's folder of a host."""
MARK = ".served"
"""A file that marks the top folder of a copy."""
RECEIVED = ".received"
"""A file that marks a checkpoint in a copy that was received from another host's copy."""


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
    """The changes in a copy since they were last sent to the notebook's host."""

    pieces: list[Piece]
    whole: list[str]
    """Checkpoints whose files have now all been sent, relative to the folder."""
    gone: list[str]
    """Files and checkpoints that were sent, completely or in part, and have been removed since."""
    num_bytes_left: int
    """The number of bytes that are still to be sent."""
    work_s: float
    """The time that the host took to collect the changes."""


def copy_of(path: Path, folder: Path) -> Path:
    """Return the path of the copy of a path of the notebook's host.

    Args:
        path: the path on the notebook's host.
        folder: the cluster's folder on the other host.
    """
    return folder / COPIES / path.relative_to(path.anchor)


def here(path: str | Path) -> Path:
    """Return the path on this rank's host for a path of the notebook's host: that of the copy if the path is
    in a served folder, else the path itself."""
    path, folder = Path(path), cluster_folder()
    if folder is None or not path.is_absolute() or not (folder / COPIES).exists():
        return path
    is_served = any((copy_of(parent, folder) / MARK).exists() for parent in (path, *path.parents))
    return copy_of(path, folder) if is_served else path


def is_copy(path: Path) -> bool:
    """Return whether a path of this rank's host is in a copy."""
    folder = cluster_folder()
    return folder is not None and path.is_relative_to(folder / COPIES)


def original(path: str | Path) -> Path:
    """Return the path on the notebook's host for a path of this rank's host, which may be in a copy."""
    path, folder = Path(path), cluster_folder()
    if folder is None or not is_copy(path):
        return path
    return Path("/") / path.relative_to(folder / COPIES)
