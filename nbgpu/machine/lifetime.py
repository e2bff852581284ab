"""Whose end ends a process of a cluster: the engines, their parent and the controller keep watch over each other.

Engines that outlive their notebook would hold the GPUs' memory with nobody to free it.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection, Iterable
from pathlib import Path

from nbgpu.protocol.records import KEPT


class LifetimeWatch:
    """Watches, through pidfds, the processes without which this one is of no use.

    Args:
        folder: the cluster's.
        owner: pidfd of whoever started the cluster, who may go once it is to be kept. Opened while the owner was sure
            to be there: an engine may be forked long after, when the number is another process's.
        others: may not go.

    Raises:
        ProcessLookupError: one of them is gone already.
    """

    def __init__(self, folder: Path, owner: int, others: Iterable[int]) -> None:
        self._kept = folder / KEPT
        self._owner = owner
        self.fds = {self._owner, *map(os.pidfd_open, others)}
        """To be selected from."""

    def over(self, ready: Collection[int]) -> bool:
        """Whether this process is of no use any more, now that these descriptors can be read."""
        if self._owner in ready and self._kept.exists():
            self.fds.discard(self._owner)
        return not self.fds.isdisjoint(ready)


def end_with(parent_pid: int) -> None:
    """End this process, from a thread of its own, as soon as its parent ends; at once where the parent has ended."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(1)
    # The pidfd was opened first: a process that gets the same number later is not taken for the parent.
    if os.getppid() != parent_pid:
        os._exit(1)

    def wait() -> None:
        select.select([parent], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="nbgpu-lifetime", daemon=True).start()
