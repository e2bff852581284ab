"""A private folder that all hosts see, for the join file and what a scheduler writes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from nbgpu.errors import ClusterError
from nbgpu.machine.files import write_whole


def new_folder(options: Mapping[str, str], prefix: str) -> Path:
    """Return the path of a folder that is to be made, in the one that `launcher_options` names or else in the
    home folder, which on most sites is on all nodes."""
    place = Path(options.get("folder", Path.home())).expanduser().absolute()
    return place / f"{prefix}{secrets.token_hex(6)}"


def make(folder: Path, join_file: Path) -> Path:
    """Make the folder, with a copy of the join file, and return the path of the copy.

    Raises:
        ClusterError: it cannot be made.
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
