"""How the processes of a cluster end together: the engines, their parent and the controller watch each other.

Engines that outlive their notebook would hold the GPUs' memory, and nothing would free it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from nbgpu.machine import watched
from nbgpu.machine.processes import has_pidfds
from nbgpu.protocol.cluster_processes import KEPT

_POLL_S = 0.1


class LifetimeWatch:
    """Watches the processes without which this one is of no use.

    Args:
        folder: the cluster's folder.
        owner: a descriptor of the process that started the cluster (`watched.watch`). That process may end
            once the cluster is marked to be kept. The descriptor is opened while the owner certainly runs,
            because an engine may be forked long after, when the pid belongs to another process.
        others: the pids of processes that must not end.

    Raises:
        ProcessLookupError: one of the others has ended already.
    """

    def __init__(self, folder: Path, owner: int, others: Iterable[int]) -> None:
        self._kept = folder / KEPT
        self._owner = owner
        self.fds = {self._owner, *(watched.watch(pid, folder) for pid in others)}
        """The descriptors to pass to `select`."""

    def over(self, ready: Collection[int]) -> bool:
        """Whether this process is of no further use, now that these descriptors can be read."""
        if self._owner in ready and self._kept.exists():
            self.fds.discard(self._owner)
        return not self.fds.isdisjoint(ready)


def end_with(parent_pid: int) -> None:
    """Start a thread that ends this process as soon as its parent ends. End it at once if the parent has
    ended."""
    try:
        parent = os.pidfd_open(parent_pid) if has_pidfds() else None
    except ProcessLookupError:
        os._exit(1)
    # The pidfd was opened first, so that a process which gets the same pid later is not mistaken for the
    # parent.
    if os.getppid() != parent_pid:
        os._exit(1)

    def wait() -> None:
        if parent is not None:
            select.select([parent], [], [])
        else:
            while os.getppid() == parent_pid:
                time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=wait, name="nbgpu-lifetime", daemon=True).start()
