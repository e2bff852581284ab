"""The host memory that is free for this user's processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
"""The first version of cgroups has a larger number for no limit."""


def free_bytes() -> int:
    """The memory that new data may take: what the host has available, or what a container's limit leaves if
    that is less."""
    available: int = psutil.virtual_memory().available
    return max(0, min([available, *_available_by_limits()]))


def _available_by_limits() -> Iterator[int]:
    for folder, limit, used, pages in _groups():
        # The group has no such files where memory is not controlled, and "max" where it is not limited.
        with suppress(OSError, ValueError):
            most = int((folder / limit).read_text())
            if most < _NO_LIMIT:
                # Pages of files are given back when memory becomes short.
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield most - int((folder / used).read_text()) + int(stat.get(pages, 0))


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield (folder, file of the limit, file of what is used, name of the pages of files in memory.stat) of
    the control groups that this process is in."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        own = root / path.lstrip("/")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        # In a container the path may be that of the host, which does not exist there; the root always exists.
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and folder.exists():
                yield folder, *names
