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
    """Give a short path of a folder, through which a socket in it can be bound or reached while the block
    lasts.

    The folder's own path may be longer than MAX_PATH_BYTES, for example where TMPDIR is long.

    Raises:
        OSError: there is no such folder.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{directory}")
    finally:
        os.close(directory)
