"""The questions of ranks on another host, which its engine takes and this process asks for."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import Question

if TYPE_CHECKING:
    from nbgpu.client.engines.other_hosts.other_host import OtherHost

_LOOK_PERIOD_S = 1.0
"""A rank says that it asks; but a thread of an earlier cell says so to that cell."""
_NEW_PATIENCE_S = 0.05
_REFUSAL_PATIENCE_S = 1.0


class OtherHostsQuestions:
    """Does what `nbgpu.host.questions.Listener` does, for the ranks of another host.

    Args:
        host: the host.
    """

    def __init__(self, host: OtherHost) -> None:
        self._host = host
        self._asked: Any = None
        self._asks_for_new = False
        self._is_new = False
        self._called_mono_s = self._looked_mono_s = time.monotonic()
        self._open: dict[int, Question] = {}
        self._answered: set[int] = set()
        self._may_be_open = False
        # The first rank may ask at once. Where the host is lost, the cell says so.
        with suppress(OSError):
            host.answer(self._tell("open"))

    def _tell(self, method: str, *args: Any) -> Any:
        return self._host.tell(Call.QUESTIONS_ON_HOST, method, *args)

    def look(self, soon: bool = False) -> dict[int, Question]:
        """Return the open questions as they were a moment ago."""
        self._is_new = self._is_new or soon
        give_up_s = time.monotonic() + _NEW_PATIENCE_S
        self._take_answer(0)
        while self._ask_if_due() and self._is_new:
            self._take_answer(give_up_s - time.monotonic())
            if time.monotonic() > give_up_s:
                break
        return self._open

    def _ask_if_due(self) -> bool:
        """Ask the host for its open questions if it is time to; return whether it owes an answer."""
        now_s = time.monotonic()
        if now_s - self._called_mono_s > _LOOK_PERIOD_S:  # another cell
            self._looked_mono_s = now_s
        self._called_mono_s = now_s
        is_due = self._is_new or self._open or now_s - self._looked_mono_s > _LOOK_PERIOD_S
        if self._asked is None and is_due and self._host.is_there:
            self._looked_mono_s = now_s
            self._asked, self._asks_for_new = self._tell("look"), self._is_new
            self._may_be_open = self._may_be_open or self._is_new
        return self._asked is not None

    def _take_answer(self, patience_s: float) -> None:
        if self._asked is None or not self._asked.wait(max(0.0, patience_s)):
            return
        asked, self._asked = self._asked, None
        if self._asks_for_new:
            self._is_new = False
        found = asked.get() if asked.successful() else {}
        self._open = {n: Question(**fields) for n, fields in found.items() if n not in self._answered}

    def answer(self, number: int, text: str) -> None:
        """Answer a question."""
        if self._open.pop(number, None) is not None and self._host.is_there:
            self._answered.add(number)
            self._tell("answer", number, text)

    def refuse(self) -> None:
        """End the open questions, with an EOFError on their ranks."""
        if (self._may_be_open or self._open) and self._host.is_there:
            # A question of the next cell may not be refused.
            self._tell("refuse").wait(_REFUSAL_PATIENCE_S)
        self._asked, self._open = None, {}
        self._may_be_open = self._is_new = False

    def close(self) -> None:
        """Take no more questions; afterwards a question is an error on its rank."""
        self._asked, self._open = None, {}
        if self._host.is_there:
            self._tell("close").wait(_REFUSAL_PATIENCE_S)
