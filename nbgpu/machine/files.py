"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(
    path: Path, content: str | bytes, mode: int = 0o666, outlasts_power_cut: bool = False
) -> None:
    """Write a file so that whoever reads it, at any moment, finds all of it, or all of the one before.

    Args:
        path: the file; what stands there is replaced.
        content: text is written as UTF-8, with backslashes for what cannot be.
        mode: the permissions, of which the process's umask takes some away.
        outlasts_power_cut: have the content on the disk before the file gets its name.

    Raises:
        OSError: it could not be written, with `path` as its file name; what stood there before is as it was.
    """
    if isinstance(content, str):
        # A path in an error's message may hold bytes that are no UTF-8.
        content = content.encode("utf-8", errors="backslashreplace")
    # Hidden, and no other writer's: several processes may write the same file at a time.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if outlasts_power_cut:
                file.flush()
                os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException as error:
        with suppress(OSError):  # it was perhaps never made
            unfinished.unlink()
        if isinstance(error, OSError):
            # The name that the caller, and perhaps a person, knows.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
