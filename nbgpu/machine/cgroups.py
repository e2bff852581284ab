"""The CPU time and memory that the control groups of this process allow.

A container has its limits there, in either version of control groups. Kernel documentation: "Control Group
v2", and "CFS Bandwidth Control" for the first version.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For the second and the first version of control groups: the file of the limit, the file of the memory in
use, and the name in memory.stat of the file pages that the kernel can drop."""
_NO_LIMIT = 2**60
"""The first version has a larger number for no limit."""


def usable_cores() -> int:
    """Return the number of cores whose time this process may use: those of its affinity, or fewer if the
    container has a smaller quota. A quota is rounded down, but to one core at least."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota() -> float | None:
    """The container's quota of CPU time, in cores; None where it is not limited."""
    quotas = []
    for folder in _folders("cpu"):
        own = folder / "cpu.max"
        if own.exists():
            quota, period = own.read_text().split()
        elif (older := folder / "cpu.cfs_quota_us").exists():
            quota, period = older.read_text().strip(), (folder / "cpu.cfs_period_us").read_text()
        else:
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """The memory above which the container is killed; None where that is not limited."""
    return min((limit for limit, *_ in _memory_limits()), default=None)


def free_memory_bytes() -> int:
    """The memory that new data may take: what the host has available, or what a container's limit leaves if
    that is less."""
    import psutil  # every notebook imports this module with the settings, and hardly any asks for this

    available: int = psutil.virtual_memory().available
    return max(0, min([available, *_left_by_limits()]))


def _left_by_limits() -> Iterator[int]:
    for limit, folder, used, pages in _memory_limits():
        with suppress(OSError, ValueError):
            # Pages of files are given back when memory becomes short.
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit - int((folder / used).read_text()) + int(stat.get(pages, 0))


def _memory_limits() -> Iterator[tuple[int, Path, str, str]]:
    """Yield (limit, folder, file of what is used, name of the pages of files in memory.stat) of the control
    groups that limit this process's memory."""
    for folder in _folders("memory"):
        for limit, used, pages in _MEMORY_FILES:
            # A group has no such file where memory is not controlled, and "max" where it is not limited.
            with suppress(OSError, ValueError):
                if (most := int((folder / limit).read_text())) < _NO_LIMIT:
                    yield most, folder, used, pages


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process, its own first."""
    if not _OWN.exists():
        return  # another system than Linux
    for line in _OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / (controller if controllers else "")
        # In a container the path may be that of the host, which does not exist there; the root always exists.
        own = root / path.lstrip("/")
        yield from (
            folder for folder in (own, *own.parents) if folder.is_relative_to(root) and folder.exists()
        )
