"""Asks the person the questions that ranks have through `input()`, one by one, and sends each rank its
answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from nbgpu.client.engines.cell_replies import Answer
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.client.ipykernel.stdin import Page, can_ask_without_waiting
from nbgpu.host.questions import Listener
from nbgpu.protocol.records import Question

_REQUEST_BYTES = 65536
_END_OF_INPUT = "\x04"


class _Person(Protocol):
    """The person in front of the notebook or the terminal."""

    def ask(self, prompt: str, password: bool) -> None: ...

    def answer(self) -> str | None:
        """Return the text that was typed, or None as long as there is none."""


@dataclass
class _Asker:
    """A rank that waits for an answer."""

    connection: socket.socket
    request: bytes = b""
    question: Question | None = None
    """The question, or None until all of it has come."""


class Questions:
    """The ranks' questions in one cell. No method waits, so that the cell is watched meanwhile.

    Args:
        listen: a function that returns the socket on which the ranks ask. If nobody can answer, it is not
            called, and `input()` on a rank raises StdinNotImplementedError as it does in a notebook's own
            kernel.
    """

    def __init__(self, listen: Callable[[], Listener]) -> None:
        self._askers: list[_Asker] = []
        self._asked: _Asker | None = None
        self._person = _person()
        self._listener = None if self._person is None else listen()

    @property
    def are_answered(self) -> bool:
        """Whether there is somebody who could answer."""
        return self._person is not None

    def check(self, results: Mapping[int, Answer], show_above: Callable[[int], None]) -> None:
        """Receive new questions, ask the next one, pass an answer on. Call about ten times a second.

        Args:
            results: the pending answers to the cell, by rank. A question is asked once the output that its
                rank printed before has come.
            show_above: a function that is called with the rank before the question is asked, to show that
                output.
        """
        if self._listener is None or self._person is None:
            return
        for connection in self._listener.take():
            connection.setblocking(False)
            self._askers.append(_Asker(connection))
        self._askers = [asker for asker in self._askers if self._still_asks(asker)]
        if self._asked is not None and (answer := self._person.answer()) is not None:
            asker, self._asked = self._asked, None
            if asker in self._askers:
                self._askers.remove(asker)
                with asker.connection, suppress(OSError):  # the rank may have been stopped
                    asker.connection.sendall(json.dumps(answer).encode() + b"\n")
        if self._asked is not None and self._asked not in self._askers:
            self._asked = None
        if self._asked is None:
            self._ask_next(results, show_above, self._person)

    def _still_asks(self, asker: _Asker) -> bool:
        """Read the part of a question that has come; return False if its rank has given up."""
        try:
            part = asker.connection.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            part = b""
        if not part:
            asker.connection.close()
            return False
        asker.request += part
        if asker.request.endswith(b"\n"):
            asker.question = Question(**json.loads(asker.request))
        return True

    def _ask_next(
        self, results: Mapping[int, Answer], show_above: Callable[[int], None], person: _Person
    ) -> None:
        for asker in self._askers:
            question = asker.question
            if question is None:
                continue
            result = results.get(question.rank)
            # A thread that an earlier cell has started asks on that cell's behalf.
            if (
                result is None
                or result.ready()
                or result.metadata["data"].get(Question.NEWEST, 0) >= question.number
            ):
                self._asked = asker
                show_above(question.rank)
                person.ask(f"rank {question.rank}: {question.prompt}", question.password)
                return

    def close(self) -> None:
        """Accept no more questions; open questions end with an EOFError on their ranks."""
        if self._listener is not None:
            for connection in [*self._listener.take(), *(asker.connection for asker in self._askers)]:
                connection.close()
            self._listener = None
        self._askers.clear()


def _person() -> _Person | None:
    """Return the person who could answer now, or None if nobody could."""
    shell = ipython_shell.current()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return _AtTerminal() if shell is not None else None
    if not kernel.get_parent("shell").get("content", {}).get("allow_stdin", False):
        return None
    return Page(kernel) if can_ask_without_waiting(kernel) else _AtTerminal()


class _AtTerminal:
    """Asks with `input()`, which waits."""

    def __init__(self) -> None:
        self._answer: str | None = None

    def ask(self, prompt: str, password: bool) -> None:
        try:
            self._answer = input(prompt)
        except EOFError:
            self._answer = _END_OF_INPUT

    def answer(self) -> str | None:
        answer, self._answer = self._answer, None
        return answer
