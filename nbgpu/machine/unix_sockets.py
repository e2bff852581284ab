"""Unix sockets in folders with long paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_PATH_BYTES = 107
"""What the kernel takes at most for the path of a Unix socket."""


@contextmanager
def short_path(folder: Path) -> Iterator[Path]:
    """Give another path of a folder, through which a socket in it can be bound or reached while the block lasts.

    Its own path may be longer than MAX_PATH_BYTES, as where TMPDIR is.

    Raises:
        OSError: there is no such folder.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{directory}")
    finally:
        os.close(directory)
