"""The limits of CPU time and memory of this process's control groups (cgroups v1 and v2), as in a container.

Kernel documentation: "Control Group v2", and "CFS Bandwidth Control" for the first version.
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
    """Return the number of cores that this process may use: those of its affinity, or the container's quota
    of CPU time if that is smaller. The quota is rounded down, to at least one core."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota() -> float | None:
    """Return the container's quota of CPU time, in cores; None if it has none."""
    quotas = []
    for folder in _folders("cpu"):
        if (v2 := folder / "cpu.max").exists():
            quota, period = v2.read_text().split()
        elif (v1 := folder / "cpu.cfs_quota_us").exists():
            quota, period = v1.read_text().strip(), (folder / "cpu.cfs_period_us").read_text()
        else:
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """Return the memory limit of the container in bytes; None if it has none."""
    return min((limit for limit, *_ in _memory_limits()), default=None)


def free_memory_bytes() -> int:
    """Return the memory in bytes that is left for new data: the host's available memory, or the rest of the
    container's limit if that is less."""
    import psutil  # imported here, because every notebook imports this module, and few need psutil

    available: int = psutil.virtual_memory().available
    return max(0, min([available, *_left_by_limits()]))


def _left_by_limits() -> Iterator[int]:
    """Yield the bytes that each memory limit leaves. The page cache is not counted as used, because the
    kernel drops it when memory becomes short."""
    for limit, folder, used, pages in _memory_limits():
        with suppress(OSError, ValueError):
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit - int((folder / used).read_text()) + int(stat.get(pages, 0))


def _memory_limits() -> Iterator[tuple[int, Path, str, str]]:
    """Yield (limit in bytes, folder, file name of the memory in use, name of the page cache in memory.stat)
    of the control groups that limit this process's memory."""
    for folder in _folders("memory"):
        for limit, used, pages in _MEMORY_FILES:
            # The file is missing if the group does not control memory, and contains "max" for no limit.
            with suppress(OSError, ValueError):
                if (num_bytes := int((folder / limit).read_text())) < _NO_LIMIT:
                    yield num_bytes, folder, used, pages


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process, its own first."""
    if not _OWN.exists():
        return  # another system than Linux
    for line in _OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / (controller if controllers else "")
        # In a container the path may be the host's, which does not exist there; the root always exists.
        leaf = root / path.lstrip("/")
        yield from (
            folder for folder in (leaf, *leaf.parents) if folder.is_relative_to(root) and folder.exists()
        )
