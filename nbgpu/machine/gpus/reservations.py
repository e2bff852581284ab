"""Reserve the GPUs of a cluster against the clusters of all users of this host.

nbgpu's registry of clusters is per user, and the driver lists a GPU's processes only once they use it. So the
process that has a cluster binds an abstract Unix socket (without a file) for each GPU. Two processes of any
users cannot bind the same name, and a name is released when its process ends. The name of a second socket
contains the pid of the process. Abstract names belong to a network namespace, so that containers with their
own network do not see them.
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
        """Release all GPUs. May be called repeatedly."""
        for uuid in [*self._sockets]:
            self._release(uuid)

    def _release(self, uuid: str) -> None:
        for bound_socket in self._sockets.pop(uuid):
            bound_socket.close()


def holders() -> dict[str, int]:
    """Return the pids of the processes that have reserved GPUs on this host, by the GPU's UUID."""
    try:
        names = _NAMES.read_text(errors="replace")
    except OSError:
        return {}  # the system is not Linux
    matches = re.findall(rf"@{_PREFIX}([^/\s]+)/([0-9]+)$", names, re.MULTILINE)
    return {uuid: int(pid) for uuid, pid in matches}


def _bound(name: str) -> socket.socket:
    """Return a socket that is bound to an abstract name and does not listen, so that nobody can connect."""
    bound_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound_socket.bind(f"\0{name}")
    except OSError:
        bound_socket.close()
        raise
    return bound_socket


def _close_in_child() -> None:
    """Close a forked child's copies of the sockets, which would keep its parent's GPUs reserved."""
    for reservations in list(_all):
        reservations.close()


os.register_at_fork(after_in_child=_close_in_child)
