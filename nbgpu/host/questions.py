"""The socket on which the ranks of this host ask the person through `input()`."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import Question

_MOST_AT_ONCE = 128


class Listener:
    """The socket on which ranks ask their questions, open from the first cell in which somebody can answer.

    Args:
        folder: the cluster's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / Question.SOCKET
        self._path.unlink(missing_ok=True)  # a kernel that was killed leaves its socket behind
        self._socket = socket.socket(socket.AF_UNIX)
        with short_path(folder) as short:
            self._socket.bind(str(short / Question.SOCKET))
        self._socket.listen(_MOST_AT_ONCE)
        self._socket.setblocking(False)

    def take(self) -> list[socket.socket]:
        """Return the connections of ranks that have come since the last call."""
        connections: list[socket.socket] = []
        if self._socket.fileno() == -1:  # closed, because a rank of the cell was given up
            return connections
        with suppress(BlockingIOError):
            while True:
                connections.append(self._socket.accept()[0])
        return connections

    def close(self) -> None:
        """Close the socket; afterwards a question is an error on its rank."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
