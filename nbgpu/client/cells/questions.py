"""Asks the person the questions that ranks have through `input()`, one by one, and sends each rank its
answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nbgpu.client.engines.cell_replies import Answer
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.client.ipykernel.stdin import Page, can_ask_without_waiting
from nbgpu.host.host import Questions
from nbgpu.protocol.records import Question

# The character of Ctrl-D, which a rank takes as the end of the input.
_END_OF_INPUT = "\x04"


class QuestionRelay:
    """The ranks' questions in one cell. No method waits, so that the cell is watched meanwhile.

    Args:
        listen: a function that returns the questions of each host. If nobody can answer, it is not called,
            and `input()` on a rank raises StdinNotImplementedError as it does in a notebook's own kernel.
    """

    def __init__(self, listen: Callable[[], Sequence[Questions]]) -> None:
        self._asked: tuple[Questions, int] | None = None
        self._num_published = 0
        self._person = _person()
        self._hosts = () if self._person is None else tuple(listen())

    @property
    def are_answered(self) -> bool:
        """Whether a person can answer `input()` on a rank."""
        return self._person is not None

    def check(self, results: Mapping[int, Answer], show_above: Callable[[int], None]) -> None:
        """Receive new questions, ask the next one, pass an answer on. Call about ten times a second.

        Args:
            results: the pending answers to the cell, by rank. A question is asked once the output that its
                rank printed before has come.
            show_above: a function that is called with the rank before the question is asked, to show that
                output.
        """
        if self._person is None:
            return
        published = sum(_newest(result) for result in results.values())
        is_new, self._num_published = published > self._num_published, published
        # One question is asked at a time: first the answer to the one that was asked is passed on.
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
            # A thread that an earlier cell has started asks on that cell's behalf.
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
        """Return the text that was typed, and forget it; None if nothing was asked since."""
        answer, self._answer = self._answer, None
        return answer
