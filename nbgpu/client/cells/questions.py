"""Asks the person the questions that ranks have through `input()`, one by one, and sends each rank its
answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nbgpu.client.engines.cell_replies import Answer
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.client.ipykernel.stdin import Page, can_ask_without_waiting
from nbgpu.host.host import Questions
from nbgpu.protocol.records import Question

_END_OF_INPUT = "\x04"
"""The character of Ctrl-D, which a rank takes as the end of the input."""


class QuestionRelay:
    """The ranks' questions in one cell. No method blocks, except at a terminal while a question is open.

    Args:
        listen: a function that returns the questions of each host. It is called only if a person can answer;
            otherwise `input()` on a rank raises StdinNotImplementedError, as it does in a plain notebook.
    """

    def __init__(self, listen: Callable[[], Sequence[Questions]]) -> None:
        self._asked: tuple[Questions, int] | None = None
        """The host and the number of the question that the person sees now."""
        self._num_published = 0
        self._person = _person()
        self._hosts = () if self._person is None else tuple(listen())

    @property
    def are_answered(self) -> bool:
        """Whether a person can answer `input()` on a rank."""
        return self._person is not None

    def check(self, results: Mapping[int, Answer], show_above: Callable[[int], None]) -> None:
        """Pass on the answer to the open question, and ask the next one. Call about ten times a second.

        Args:
            results: the pending replies to the cell, by rank. A question is asked once the output that its
                rank printed before it has come.
            show_above: a function that is called with the rank before the question is asked, to show that
                output.
        """
        if self._person is None:
            return
        num_published = sum(_newest(result) for result in results.values())
        is_new, self._num_published = num_published > self._num_published, num_published
        questions = [
            (host, number, question) for host in self._hosts for number, question in host.look(is_new).items()
        ]
        if self._asked is not None and (answer := self._person.answer()) is not None:
            host, number = self._asked
            host.answer(number, answer)
            questions = [question for question in questions if question[:2] != self._asked]
        if self._asked is not None and self._asked not in [question[:2] for question in questions]:
            self._asked = None  # the rank no longer waits for an answer
        if self._asked is None:
            self._ask_next(questions, results, show_above, self._person)

    def _ask_next(
        self,
        questions: Sequence[tuple[Questions, int, Question]],
        results: Mapping[int, Answer],
        show_above: Callable[[int], None],
        person: Page | _AtTerminal,
    ) -> None:
        """Ask the first of the open questions whose rank's earlier output is here."""
        for host, number, question in questions:
            result = results.get(question.rank)
            # Without a pending reply, a thread of an earlier cell asks.
            if result is None or result.ready() or _newest(result) >= question.number:
                self._asked = host, number
                show_above(question.rank)
                person.ask(f"rank {question.rank}: {question.prompt}", question.password)
                return

    def close(self) -> None:
        """Accept no more questions; open questions end with an EOFError on their ranks."""
        for host in self._hosts:
            host.refuse()
        self._hosts = ()


def _newest(result: Answer) -> int:
    """Return the number of the last question that a rank has published in this cell; 0 if there is none."""
    number: int = result.metadata["data"].get(Question.NEWEST, 0)
    return number


def _person() -> Page | _AtTerminal | None:
    """Return how to ask the person, by the page or at the terminal; None if nobody could answer."""
    shell = ipython_shell.current()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return _AtTerminal() if shell is not None else None
    if not kernel.get_parent("shell").get("content", {}).get("allow_stdin", False):
        return None
    return Page(kernel) if can_ask_without_waiting(kernel) else _AtTerminal()


class _AtTerminal:
    """Asks with `input()`, which blocks until the person has answered."""

    def __init__(self) -> None:
        self._answer: str | None = None

    def ask(self, prompt: str, password: bool) -> None:
        try:
            self._answer = input(prompt)
        except EOFError:
            self._answer = _END_OF_INPUT

    def answer(self) -> str | None:
        """Return the text that was typed, and forget it; None if nothing was asked since."""
        answer, self._answer = self._answer, None
        return answer
