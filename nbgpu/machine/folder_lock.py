"""Let one process at a time go on with the work whose state is in a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nbgpu.errors import RunError


def lock(folder: Path) -> int:
    """Lock a folder. The lock ends when the descriptor is closed, with this process at the latest. On NFS
    Linux shows it to the other hosts, too.

    Returns:
        The descriptor of the lock's file.

    Raises:
        RunError: another process, which the message names, or another object of this one has the lock.
    """
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 100).decode()
        os.close(fd)
        raise RunError(f"{folder.name} is running in process {owner}. Stop it there first") from None
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd
