"""The time by the notebook's clock, and ids that tell whether two processes share a boot or a clock."""

from __future__ import annotations

import time
from pathlib import Path

_ahead_s = 0.0


def keep_time_with(ahead_s: float) -> None:
    """Set the correction of this host's clock for `notebooks_time_s`.

    Args:
        ahead_s: the seconds by which this host's clock is ahead of the clock of the notebook's host.
    """
    global _ahead_s
    _ahead_s = ahead_s


def notebooks_time_s() -> float:
    """Return the time in seconds since the epoch by the clock of the notebook's host, which may be another
    host."""
    return time.time() - _ahead_s


def boot_id() -> str:
    """Return the id of the machine's boot, which its containers share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def clock_id() -> str:
    """Return an id of the monotonic clock of this process: two processes with the same id read the same
    clock.

    Linux has one such clock per boot, which a container with its own time namespace may see with an offset.
    """
    try:
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:
        namespace = ""  # kernels before 5.6 have no such namespaces
    return f"{boot_id()} {namespace}"
