"""The socket on which the ranks of this host ask the person through `input()`."""

from __future__ import annotations

import itertools
import json
import socket
from contextlib import suppress
from pathlib import Path

from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import Question

_MOST_AT_ONCE = 128
"""The most ranks whose connections may wait to be accepted."""
_REQUEST_BYTES = 65536


class _Asker:
    """A rank that waits for an answer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.request = b""

    def still_asks(self) -> bool:
        """Read the part of the question that has come; return False if the rank has given up."""
        try:
            part = self.connection.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            part = b""
        self.request += part
        return bool(part)

    def question(self) -> Question | None:
        """The question; None until all of it has come."""
        return Question(**json.loads(self.request)) if self.request.endswith(b"\n") else None


class Listener:
    """Takes the questions of this host's ranks. No method waits.

    It is open from the first cell in which somebody can answer.

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
        self._socket.listen(_MOST_AT_ONCE)
        self._socket.setblocking(False)
        self._numbers = itertools.count()
        self._askers: dict[int, _Asker] = {}

    def look(self, soon: bool = False) -> dict[int, Question]:
        """Return the open questions in the order in which they came, by a number that `answer` takes.

        Args:
            soon: whether it is known that a new question has come; for hosts that must ask elsewhere.
        """
        self._accept()
        for number, asker in list(self._askers.items()):
            if not asker.still_asks():
                self._askers.pop(number).connection.close()
        return {number: asked for number, asker in self._askers.items() if (asked := asker.question())}

    def _accept(self) -> None:
        """Accept the connections that wait; each is one question of a rank."""
        if self._socket.fileno() == -1:  # closed, because a rank of the cell was given up
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
        """End the open questions, with an EOFError on their ranks."""
        self._accept()
        for asker in self._askers.values():
            asker.connection.close()
        self._askers.clear()

    def close(self) -> None:
        """Close the socket; afterwards a question is an error on its rank."""
        self.refuse()
        self._socket.close()
        self._path.unlink(missing_ok=True)
