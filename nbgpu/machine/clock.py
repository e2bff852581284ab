"""The clock by which the processes of a host tell moments, and the boot since which it runs."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Return the id of the host's boot. Containers of one machine have the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def clock_id() -> str:
    """Return what identifies the monotonic clock of this process: two processes with the same id read the
    same clock.

    Linux has one such clock since the start of the host. A container may have another zero of it, in a time
    namespace of its own.
    """
    try:
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:
        namespace = ""  # kernels before 5.6 have no such namespaces
    return f"{boot_id()} {namespace}"
