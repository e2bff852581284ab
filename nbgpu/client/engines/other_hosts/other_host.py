"""A host that is not this one, reached through its engine of ipyparallel (engine/process/host_calls.py)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nbgpu.client.engines.calls import reference
from nbgpu.host.endings import ExitStatus, Whose
from nbgpu.machine.processes import CoreUse
from nbgpu.machine.signals import take_interrupt
from nbgpu.protocol.calls import Call
from nbgpu.protocol.hosts import HostDescription, JoinedHost
from nbgpu.protocol.records import MainThreadState, Question

if TYPE_CHECKING:
    from nbgpu.client.engines.connection import Client

_PATIENCE_S = 10.0
_FORK_PATIENCE_S = 70.0
"""The fork server may still import torch, for which its host waits a minute."""
_POLL_PERIOD_S = 0.05
_LOOK_S = 0.2
_LINE_PATIENCE_S = 1.0
_NUM_CLOCK_MESSAGES = 5
_HOST_SILENT_S = 2.0
"""A host that is heard answers within a fraction of a second where its ranks are."""
_QUICK_PATIENCE_S = 1.0
"""For answers that the notebook can do without: the host may be lost, which is known some seconds later."""
_QUESTIONS_PERIOD_S = 1.0
"""A rank says that it asks; but a thread of an earlier cell says so to that cell."""
_QUESTION_PATIENCE_S = 0.05
_REFUSAL_PATIENCE_S = 1.0


class HostLostError(ConnectionError):
    """A host is not heard any more."""

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host} is lost: it is not heard any more")


class OtherHost:
    """Does what `Host` says, with one message to the host's engine for each call.

    Args:
        client: ipyparallel's client.
        engine: the number of the host's engine.
        description: what the host says of itself.
        name: its name, unique in the cluster.
        numbers: the numbers of engines that are still free in the cluster.
    """

    def __init__(
        self, client: Client, engine: int, description: HostDescription, name: str, numbers: Iterator[int]
    ) -> None:
        self.name = name
        self.description = description
        self._client = client
        self.engine = engine
        """The number of the host's engine."""
        self._numbers = numbers
        self._number_of: dict[int, int] = {}
        """The engines' numbers by pid."""
        self._came: set[int] = set()
        """Processes whose engines have registered."""
        self._endings: dict[int, ExitStatus] = {}
        self.has_ranks = False
        """Whether ranks of the cluster are on it now."""

    @cached_property
    def _view(self) -> Any:
        """ipyparallel's view of the host's engine, which can be made while the host is heard. A host of a
        kept cluster may have been lost before this notebook attached to it."""
        return self._client[self.engine]

    def make_successor(self, engine: int, description: HostDescription, name: str) -> OtherHost:
        """Return the host that replaces this one, which is lost: the same machine or another, with a new
        engine.

        For the new one the processes of this one count as ended.
        """
        host = OtherHost(self._client, engine, description, name, self._numbers)
        host._number_of = dict(self._number_of)
        host._endings = {pid: self._endings.get(pid, ExitStatus(None)) for pid in self._number_of}
        return host

    @property
    def joined(self) -> JoinedHost:
        """What the cluster's next owner must know of it."""
        return JoinedHost(self.name, self.engine, asdict(self.description), self.clock_ahead_s)

    def take_over(self, numbers: Mapping[int, int]) -> None:
        """Take over the host's engines, by pid, which another process has had forked."""
        self._number_of |= numbers
        self._came |= set(numbers)
        # They were asked of somebody who is gone.
        if self.is_there:
            self.tell(Call.QUESTIONS_ON_HOST, "refuse")

    @cached_property
    def clock_ahead_s(self) -> float:
        """How far its clock is ahead of this host's, in seconds; 0 where they agree within what can be told.

        It is measured once, by messages there and back, of which the quickest counts: the clock there was
        read at some moment in between (Cristian 1989, "Probabilistic clock synchronization").
        """
        measured = []
        try:
            for _ in range(_NUM_CLOCK_MESSAGES):
                asked_s = time.time()
                there_s = self.answer(self.tell(Call.CLOCK_OF_HOST))
                answered_s = time.time()
                measured.append(((answered_s - asked_s) / 2, there_s - (asked_s + answered_s) / 2))
        except OSError:
            # A host that is lost has no ranks whose times count; from a busy one fewer answers may have come.
            if not measured or not self.is_there:
                return 0.0
        error_s, ahead_s = min(measured)
        return ahead_s if abs(ahead_s) > error_s else 0.0

    @property
    def is_there(self) -> bool:
        """Whether the host is heard."""
        return self.engine in self._client.ids

    def tell(self, call: Call, *args: Any) -> Any:
        """Send a request, and return its pending answer at once.

        Raises:
            HostLostError: the host is not heard any more.
        """
        if self.is_there:
            # The engine may be gone since.
            with suppress(IndexError):
                return self._view.apply_async(reference(call), *args)
        raise HostLostError(self.name)

    def _ask(self, method: str, *args: Any, patience_s: float = _PATIENCE_S) -> Any:
        """Have a method called on the host, and return what it returns; OSError if it raises or the host does
        not answer."""
        return self.answer(self.tell(Call.CALL_ON_HOST, method, *args), patience_s)

    def _ask_quickly(self, method: str, *args: Any) -> Any:
        """As `_ask`, for what the notebook can do without; None where no answer comes within a moment."""
        try:
            return self._ask(method, *args, patience_s=_QUICK_PATIENCE_S)
        except OSError:
            return None

    def answer(self, asked: Any, patience_s: float = _PATIENCE_S) -> Any:
        """Wait for the answer to a request, and return it.

        Raises:
            OSError: the host is lost, does not answer in time, or an exception was raised there.
        """
        # Here, because ipyparallel is imported after the processes are launched.
        from ipyparallel.error import RemoteError

        give_up_s = time.monotonic() + patience_s
        while not asked.wait(_POLL_PERIOD_S):
            take_interrupt()
            if not self.is_there:
                raise HostLostError(self.name)
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"host {self.name} did not answer within {patience_s:g} s")
        try:
            return asked.get()
        except RemoteError as error:
            if not self.is_there:
                raise HostLostError(self.name) from None
            raise OSError(f"on host {self.name}: {error.ename}: {error.evalue}") from None

    def begin_engines(self, num: int) -> None:
        """Have the first engines forked: there are none before `fork_engines` asks for them."""
        assert num == 0

    def fork_engines(self, num: int) -> Callable[[], dict[int, int]]:
        """Have engines forked, and return at once a function that waits for them and returns their pids by
        number; OSError where that fails."""
        asked = self.tell(Call.FORK_ON_HOST, [next(self._numbers) for _ in range(num)])

        def forked() -> dict[int, int]:
            pids: dict[int, int] = self.answer(asked, _FORK_PATIENCE_S)
            # A pid may have been another engine's before.
            for pid in pids.values():
                self._endings.pop(pid, None)
                self._came.discard(pid)
            self._number_of |= {pid: number for number, pid in pids.items()}
            return pids

        return forked

    def fork_engine(self, take: Callable[[int, int], None]) -> None:
        """Have one more engine forked, and call `take` with its pid and its number in ipyparallel."""
        ((number, pid),) = self.fork_engines(1)().items()
        take(pid, number)

    def prepare_to_train(self, recipes: Sequence[str]) -> None:
        """Have the imports done that later engines need to train, and return at once."""
        self._send_if_connected("prepare_to_train", list(recipes))

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to engines; one that has ended gets none."""
        living = [pid for pid in pids if pid not in self._endings]
        if living:
            self._send_if_connected("send_signal", living, int(number))

    def interrupt(self, pids: Iterable[int]) -> None:
        """Raise KeyboardInterrupt in engines, and end the programs that they run."""
        self._send_if_connected("interrupt", list(pids))

    def give_up(self, pids: Iterable[int], generation: int) -> None:
        """Tell ranks that a generation of their group is given up, and return at once."""
        self._send_if_connected("give_up", list(pids), generation)

    def _send_if_connected(self, method: str, *args: Any) -> None:
        if self.is_there:
            self.tell(Call.CALL_ON_HOST, method, *args)

    def is_ending(self, pid: int) -> bool:
        """Whether a process is on its way out: its host tells of the end by itself."""
        if self._number_of.get(pid) in self._client.ids:
            self._came.add(pid)
            return False
        return pid in self._came or not self.is_there

    def glance(self, pid: int) -> _Glance:
        """Make an object for frequent looks at a process."""
        return _Glance(self, pid)

    def how_ended(self, pid: int) -> ExitStatus | None:
        """How an engine ended; None while it lives."""
        if pid in self._endings:
            return self._endings[pid]
        if self._number_of.get(pid) in self._client.ids:
            self._came.add(pid)
            return None
        try:
            status = self._ask("how_ended", pid)
        except OSError:
            status = ExitStatus(None)
        if status is None:
            return None
        self._endings[pid] = ending = ExitStatus(*status)
        return ending

    def num_ended(self) -> int:
        """The number of engines of which an end is recorded."""
        return int(self._ask("num_ended"))

    def standstill(self, pid: int) -> str:
        """Why a living process does nothing at all, and the remedy, in words; empty if nothing holds it."""
        reason = self._ask_quickly("standstill", pid)
        return f"on host {self.name} {reason}" if reason else ""

    def resident_bytes(self, pid: int) -> int | None:
        """The memory that a process has in RAM; None if it has ended."""
        used: int | None = self._ask_quickly("resident_bytes", pid)
        return used

    def core_uses(self, pids: Sequence[int]) -> dict[int, CoreUse]:
        """The core time that each process has used and waited for; one that has ended is left out."""
        uses = self._ask_quickly("core_uses", list(pids)) or {}
        return {pid: CoreUse(*used) for pid, used in uses.items()}

    def stacks(self) -> _Stacks:
        """Make an object that asks ranks where they are. The caller closes it."""
        return _Stacks(self)

    def questions(self) -> _Questions:
        """Begin to take the ranks' questions, and return the object that has them. The caller closes it."""
        return _Questions(self)

    def log_tail(self, whose: Whose = "engines") -> str:
        """The last lines of a log, as sentences for an error message."""
        try:
            return f"On host {self.name}: {self._ask('log_tail', whose)}"
        except OSError as error:
            return f"{error}."

    def end(self) -> None:
        """Have the host end its part of the cluster, and return at once."""
        if self.is_there:
            self.tell(Call.END_HOST_SOON)


class _Glance:
    """Tells whether a process on another host is exiting, from what was pushed."""

    def __init__(self, host: OtherHost, pid: int) -> None:
        self._host = host
        self._pid = pid

    def is_ending(self) -> bool:
        return self._host.is_ending(self._pid)

    def close(self) -> None:
        pass


class _Stacks:
    """Asks the ranks of another host where they are, all with one message."""

    def __init__(self, host: OtherHost) -> None:
        self._host = host
        self._name = secrets.token_hex(8)
        self._asked: Any = None
        self._sent_mono_s = 0.0
        """When the host was asked last."""
        self._asked_mono_s: dict[int, float] = {}
        self._last: dict[int, Any] = {}

    def ask(self, pids: Iterable[int]) -> None:
        if self._asked is not None or not self._host.is_there:
            return
        for pid in pids:
            self._asked_mono_s.setdefault(pid, time.monotonic())
        self._asked = self._host.tell(Call.LOOK_ON_HOST, list(pids), _LOOK_S, self._name)
        self._sent_mono_s = time.monotonic()

    def collect(self, patience_s: float = 0.0) -> dict[int, MainThreadState]:
        if self._asked is None or not self._asked.wait(patience_s):
            return {}
        asked, self._asked = self._asked, None
        if not asked.successful():  # the host has gone
            return {}
        self._last = asked.get()
        answers = {
            pid: MainThreadState(**fields[0]) for pid, fields in self._last.items() if fields[0] is not None
        }
        for pid in answers:
            self._asked_mono_s.pop(pid, None)
        return answers

    def silent_s(self, pid: int) -> float:
        asked_mono_s = self._asked_mono_s.get(pid)
        return 0.0 if asked_mono_s is None else time.monotonic() - asked_mono_s

    def computes(self, pid: int) -> bool | None:
        return self._last[pid][1] if pid in self._last else False

    def waits_in_the_system(self, pid: int) -> bool:
        return pid in self._last and bool(self._last[pid][2])

    def standstill(self, pid: int) -> str:
        silent_s = time.monotonic() - self._sent_mono_s
        if self._asked is not None and silent_s > _HOST_SILENT_S:
            # Of the rank nothing is known then.
            return f"host {self._host.name} is not heard for {silent_s:.0f} s"
        return str(self._last[pid][3]) if pid in self._last else ""

    def cell_line(self, pid: int) -> int | None:
        try:
            line: int | None = self._host.answer(
                self._host.tell(Call.CELL_LINE_ON_HOST, pid), _LINE_PATIENCE_S
            )
        except OSError:
            return None
        return line

    def close(self) -> None:
        self._asked = None


class _Questions:
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
            host.answer(self._send("open"))

    def _send(self, method: str, *args: Any) -> Any:
        return self._host.tell(Call.QUESTIONS_ON_HOST, method, *args)

    def look(self, soon: bool = False) -> dict[int, Question]:
        """Return the open questions as they were a moment ago."""
        self._is_new = self._is_new or soon
        give_up_s = time.monotonic() + _QUESTION_PATIENCE_S
        self._receive_answer(0)
        while self._ask_if_due() and self._is_new:
            self._receive_answer(give_up_s - time.monotonic())
            if time.monotonic() > give_up_s:
                break
        return self._open

    def _ask_if_due(self) -> bool:
        """Ask the host for its open questions if it is time to; return whether it owes an answer."""
        now_s = time.monotonic()
        if now_s - self._called_mono_s > _QUESTIONS_PERIOD_S:  # another cell
            self._looked_mono_s = now_s
        self._called_mono_s = now_s
        is_due = self._is_new or self._open or now_s - self._looked_mono_s > _QUESTIONS_PERIOD_S
        if self._asked is None and is_due and self._host.is_there:
            self._looked_mono_s = now_s
            self._asked, self._asks_for_new = self._send("look"), self._is_new
            self._may_be_open = self._may_be_open or self._is_new
        return self._asked is not None

    def _receive_answer(self, patience_s: float) -> None:
        """Take over the open questions if the host's answer comes within the patience."""
        if self._asked is None or not self._asked.wait(max(0.0, patience_s)):
            return
        asked, self._asked = self._asked, None
        if self._asks_for_new:
            self._is_new = False
        questions = asked.get() if asked.successful() else {}
        self._open = {n: Question(**fields) for n, fields in questions.items() if n not in self._answered}

    def answer(self, number: int, text: str) -> None:
        """Answer a question."""
        if self._open.pop(number, None) is not None and self._host.is_there:
            self._answered.add(number)
            self._send("answer", number, text)

    def refuse(self) -> None:
        """End the open questions, with an EOFError on their ranks."""
        if (self._may_be_open or self._open) and self._host.is_there:
            # A question of the next cell may not be refused.
            self._send("refuse").wait(_REFUSAL_PATIENCE_S)
        self._asked, self._open = None, {}
        self._may_be_open = self._is_new = False

    def close(self) -> None:
        """Take no more questions; afterwards a question is an error on its rank."""
        self._asked, self._open = None, {}
        if self._host.is_there:
            self._send("close").wait(_REFUSAL_PATIENCE_S)
