"""Unix sockets in folders with long paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_PATH_BYTES = 107
"""The longest path of a Unix socket that Linux accepts."""


@contextmanager
def short_path(folder: Path) -> Iterator[Path]:
    """Provide a short path to a folder for the block, with which sockets in the folder can be bound or
    connected to although the folder's path may be longer than MAX_PATH_BYTES, for example because of a long
    TMPDIR.

    Raises:
        OSError: there is no such folder.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{directory}")
    finally:
        os.close(directory)
