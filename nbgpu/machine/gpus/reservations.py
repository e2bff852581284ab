"""Say to all users of this host which GPUs a cluster has, also before a process computes on them.

The registry is one user's own, and the driver knows a GPU's processes only once they have touched it. So the
process that has a cluster binds a Unix socket for each GPU, whose name has no file (Linux's abstract names).
Two processes cannot bind the same name, whoever they belong to, and all names end with their process. A
second name says which process has the first. Containers with a network of their own have names of their own.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import weakref
from collections.abc import Collection
from pathlib import Path

_NAMES = Path("/proc/net/unix")
_PREFIX = "nbgpu/gpu/"

_all: weakref.WeakSet[Reservations] = weakref.WeakSet()


class Reservations:
    """The GPUs that this process has reserved for one cluster."""

    def __init__(self) -> None:
        self._sockets: dict[str, list[socket.socket]] = {}
        _all.add(self)

    def hold(self, uuids: Collection[str]) -> bool:
        """Reserve exactly these GPUs and release all others; return whether all could be reserved. A GPU that
        another process has reserved stays with that process."""
        for uuid in self._sockets.keys() - set(uuids):
            self._release(uuid)
        is_complete = True
        for uuid in uuids:
            if uuid in self._sockets:
                continue
            try:
                first = _bound(f"{_PREFIX}{uuid}")
                self._sockets[uuid] = [first, _bound(f"{_PREFIX}{uuid}/{os.getpid()}")]
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                is_complete = False
        return is_complete

    def close(self) -> None:
        """Release all. Harmless when repeated."""
        for uuid in [*self._sockets]:
            self._release(uuid)

    def _release(self, uuid: str) -> None:
        for each in self._sockets.pop(uuid):
            each.close()


def holders() -> dict[str, int]:
    """The processes that have reserved GPUs on this host, by the GPU's UUID."""
    try:
        names = _NAMES.read_text(errors="replace")
    except OSError:
        return {}  # another system than Linux
    found = re.findall(rf"@{_PREFIX}([^/\s]+)/([0-9]+)$", names, re.MULTILINE)
    return {uuid: int(pid) for uuid, pid in found}


def _bound(name: str) -> socket.socket:
    """A socket with a name, to which nobody can connect, because nothing listens."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        raise
    return made


def _close_in_child() -> None:
    # A child would keep its parent's GPUs reserved.
    for each in list(_all):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
