"""Whose end ends a process of a cluster: the engines, their parent and the controller keep watch over each other.

Engines that outlive their notebook would hold the GPUs' memory with nobody to free it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from nbgpu.records import KEPT


class Vigil:
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
