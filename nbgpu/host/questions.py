"""The socket on which the ranks of this host send their questions of `input()`."""

from __future__ import annotations

import itertools
import json
import socket
from contextlib import suppress
from pathlib import Path

from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import Question

_BACKLOG = 128
"""The number of connections that may wait to be accepted."""
_REQUEST_BYTES = 65536


class _Asker:
    """A rank that waits for an answer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.request = b""

    def still_asks(self) -> bool:
        """Read the next part of the question, if there is one; return False if the rank has given up."""
        try:
            part = self.connection.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            part = b""
        self.request += part
        return bool(part)

    def question(self) -> Question | None:
        """Return the question; None if it is not complete yet."""
        return Question(**json.loads(self.request)) if self.request.endswith(b"\n") else None


class Listener:
    """Receives the questions of this host's ranks. No method blocks.

    It is opened for the first cell in which a person can answer.

    Args:
        folder: the cluster's folder on this host.
    """

    def __init__(self, folder: Path) -> None:
        """Bind the socket in the cluster's folder and listen, without blocking."""
        self._path = folder / Question.SOCKET
        self._path.unlink(missing_ok=True)  # a kernel that was killed leaves its socket behind
        self._socket = socket.socket(socket.AF_UNIX)
        with short_path(folder) as short:
            self._socket.bind(str(short / Question.SOCKET))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._numbers = itertools.count()
        self._askers: dict[int, _Asker] = {}

    def look(self, soon: bool = False) -> dict[int, Question]:
        """Return the open questions in the order of their arrival, by a number for `answer`.

        Args:
            soon: whether a new question is known to have arrived; only used for other hosts.
        """
        self._accept()
        for number, asker in list(self._askers.items()):
            if not asker.still_asks():
                self._askers.pop(number).connection.close()
        return {number: asked for number, asker in self._askers.items() if (asked := asker.question())}

    def _accept(self) -> None:
        """Accept the waiting connections; each is one question of a rank."""
        if self._socket.fileno() == -1:  # `close` was called, because a rank of the cell was given up
            return
        with suppress(BlockingIOError):
            while True:
                self._askers[next(self._numbers)] = _Asker(self._socket.accept()[0])

    def answer(self, number: int, text: str) -> None:
        """Answer a question."""
        asker = self._askers.pop(number, None)
        if asker is not None:
            with asker.connection, suppress(OSError):  # the rank may have been stopped
                asker.connection.sendall(json.dumps(text).encode() + b"\n")

    def refuse(self) -> None:
        """Close the open questions, which raises EOFError on their ranks."""
        self._accept()
        for asker in self._askers.values():
            asker.connection.close()
        self._askers.clear()

    def close(self) -> None:
        """Close the socket; a later question is an error on its rank."""
        self.refuse()
        self._socket.close()
        self._path.unlink(missing_ok=True)
