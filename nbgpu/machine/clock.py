"""The clocks by which the processes of a host tell moments, and the boot since which it runs."""

from __future__ import annotations

import time
from pathlib import Path

_ahead_s = 0.0


def keep_time_with(ahead_s: float) -> None:
    """Have `notebooks_time_s` correct this host's clock from now on.

    Args:
        ahead_s: the seconds by which this host's clock is ahead of the clock of the notebook's host.
    """
    global _ahead_s
    _ahead_s = ahead_s


def notebooks_time_s() -> float:
    """Return the time in seconds since the epoch, by the clock of the notebook's host also where this is
    another one."""
    return time.time() - _ahead_s


def boot_id() -> str:
    """Return the id of the host's boot. Containers of one machine have the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def clock_id() -> str:
    """Return an id of the monotonic clock of this process: two processes with the same id read the same
    clock.

    Linux has one such clock since the start of the host. A container with a time namespace of its own may
    have another zero.
    """
    try:
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:
        namespace = ""  # kernels before 5.6 have no such namespaces
    return f"{boot_id()} {namespace}"
