"""What the control groups of this process leave it of the host: the time of the cores, and memory.

A container has its limits there, in either version of control groups. Kernel documentation: "Control Group
v2", and "CFS Bandwidth Control" for the first version.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The number of cores whose time this process may use: those of its affinity, or fewer where the
    container has a smaller quota. A fraction of a core counts only where it is all there is."""
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
    names = ("memory.max", "memory.limit_in_bytes")
    paths = [folder / name for folder in _folders("memory") for name in names]
    limits = [path.read_text().strip() for path in paths if path.exists()]
    # The first version of cgroups has a very large number for no limit.
    return min((int(text) for text in limits if text != "max" and int(text) < 2**60), default=None)


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
