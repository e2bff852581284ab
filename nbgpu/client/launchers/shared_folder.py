"""A private folder that all hosts share, for the join file and the output of a scheduler's job."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from nbgpu.errors import ClusterError
from nbgpu.machine.files import write_whole


def new_folder(options: Mapping[str, str], prefix: str) -> Path:
    """Return the path of a new folder, which `make` makes. It is inside the folder that `launcher_options`
    names, or else inside the home folder, which the nodes of most sites share.

    Args:
        options: `launcher_options`.
        prefix: the beginning of the folder's name.
    """
    parent = Path(options.get("folder", Path.home())).expanduser().absolute()
    return parent / f"{prefix}{secrets.token_hex(6)}"


def make(folder: Path, join_file: Path) -> Path:
    """Make a folder with a copy of the join file in it, and return the path of the copy.

    Raises:
        ClusterError: the folder cannot be made.
    """
    copy = folder / join_file.name
    try:
        folder.mkdir(mode=0o700)
        write_whole(copy, join_file.read_text(), mode=0o600)
    except OSError as error:
        raise ClusterError(
            f"no folder for the hosts can be made: {error}. launcher_options={{'folder': ...}} names another place, which all "
            "of them see"
        ) from None
    return copy
