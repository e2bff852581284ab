"""Another host of the cluster. Its program (engine/process/host.py) is an engine of ipyparallel, to which
each method here sends a call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

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
"""The fork server may still import torch, and the host waits a minute for that."""
_POLL_PERIOD_S = 0.05
_LOOK_S = 0.2
"""How long the host waits for its ranks to say what they do."""
_LINE_PATIENCE_S = 1.0
_NUM_CLOCK_MESSAGES = 5
_HOST_SILENT_S = 2.0
"""A host that is connected says within a fraction of a second what its ranks do."""
_QUICK_PATIENCE_S = 1.0
"""For answers that are not necessary: the host may be lost, which is noticed only after some seconds."""
_QUESTIONS_PERIOD_S = 1.0
"""How often a host is asked for questions that nothing has announced: a rank announces a question to the cell
that asks, and if that cell is over nobody hears it."""
_QUESTION_PATIENCE_S = 0.05
_REFUSAL_PATIENCE_S = 1.0


class HostLostError(ConnectionError):
    """A host has lost its connection to the controller."""

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host} is lost: it is not heard any more")


class OtherHost:
    """Implements `Host` for another host, with one message to the host's engine for each call.

    Args:
        client: ipyparallel's client.
        engine: the number of the host's engine.
        description: the host's description of itself.
        name: its name, unique in the cluster.
        numbers: yields engine numbers that are free in the cluster.
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
        self._registered: set[int] = set()
        """The pids of the engines that have registered with the controller, also if they have ended since."""
        self._endings: dict[int, ExitStatus] = {}
        """The exit statuses by pid, where they are known."""
        self.has_ranks = False
        """Whether ranks of the cluster are on this host now."""

    @cached_property
    def _view(self) -> Any:
        """ipyparallel's view of the host's engine. It is made late, because that fails if the host is lost,
        as a host of a kept cluster may be when a notebook attaches."""
        return self._client[self.engine]

    def make_successor(self, engine: int, description: HostDescription, name: str) -> OtherHost:
        """Return the host that replaces this one, which is lost: the same machine or another one, with a new
        engine. There, all processes of this host count as ended."""
        host = OtherHost(self._client, engine, description, name, self._numbers)
        host._number_of = dict(self._number_of)
        host._registered = set(self._number_of)
        host._endings = {pid: self._endings.get(pid, ExitStatus(None)) for pid in self._number_of}
        return host

    @property
    def joined(self) -> JoinedHost:
        """The host's record in the registry, for the cluster's next owner."""
        return JoinedHost(self.name, self.engine, asdict(self.description), self.clock_ahead_s)

    def take_over(self, numbers: Mapping[int, int]) -> None:
        """Take over the engines that an earlier owner of the cluster has started: their numbers, by pid."""
        self._number_of |= numbers
        self._registered |= set(numbers)
        # Open questions of ranks were meant for the earlier owner.
        if self.is_there:
            self.tell(Call.QUESTIONS_ON_HOST, "refuse")

    @cached_property
    def clock_ahead_s(self) -> float:
        """How far the host's clock is ahead of this host's, in seconds; 0 if the difference is too small to
        be measured.

        It is measured once, with several round trips. The other clock was read at some moment of a round
        trip, so that half of its time is the largest error, and the fastest one counts (Cristian 1989,
        "Probabilistic clock synchronization").
        """
        errors_and_differences_s = []
        try:
            for _ in range(_NUM_CLOCK_MESSAGES):
                sent_s = time.time()
                there_s = self.answer(self.tell(Call.CLOCK_OF_HOST))
                received_s = time.time()
                difference_s = there_s - (sent_s + received_s) / 2
                errors_and_differences_s.append(((received_s - sent_s) / 2, difference_s))
        except OSError:
            # A lost host has no ranks whose times matter. A busy one may have answered less often.
            if not errors_and_differences_s or not self.is_there:
                return 0.0
        error_s, difference_s = min(errors_and_differences_s)
        return difference_s if abs(difference_s) > error_s else 0.0

    @property
    def is_there(self) -> bool:
        """Whether the host is connected: the controller gets its heartbeats."""
        return self.engine in self._client.ids

    def tell(self, call: Call, *args: Any) -> Any:
        """Send a request, and return its pending answer at once.

        Raises:
            HostLostError: the host has lost its connection.
        """
        if self.is_there:
            # The engine may be unregistered after the check.
            with suppress(IndexError):
                return self._view.apply_async(reference(call), *args)
        raise HostLostError(self.name)

    def _ask(self, method: str, *args: Any, patience_s: float = _PATIENCE_S) -> Any:
        """Call a method of the other host's `ThisHost`, and return its result. Raise OSError if the method
        raises or the host does not answer."""
        return self.answer(self.tell(Call.CALL_ON_HOST, method, *args), patience_s)

    def _ask_quickly(self, method: str, *args: Any) -> Any:
        """Like `_ask`, for results that are not necessary: return None if the host does not answer soon."""
        try:
            return self._ask(method, *args, patience_s=_QUICK_PATIENCE_S)
        except OSError:
            return None

    def answer(self, request: Any, patience_s: float = _PATIENCE_S) -> Any:
        """Wait for the answer to a request that `tell` has returned, and return it.

        Raises:
            OSError: the host is lost, does not answer in time, or an exception was raised there.
        """
        # Here, because ipyparallel is imported after the processes are launched.
        from ipyparallel.error import RemoteError

        give_up_s = time.monotonic() + patience_s
        while not request.wait(_POLL_PERIOD_S):
            take_interrupt()
            if not self.is_there:
                raise HostLostError(self.name)
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"host {self.name} did not answer within {patience_s:g} s")
        try:
            return request.get()
        except RemoteError as error:
            if not self.is_there:
                raise HostLostError(self.name) from None
            raise OSError(f"on host {self.name}: {error.ename}: {error.evalue}") from None

    def begin_engines(self, num: int) -> None:
        """Do nothing: all engines of another host are forked by `fork_engines`."""
        assert num == 0

    def fork_engines(self, num: int) -> Callable[[], dict[int, int]]:
        """Let the host fork engines, and return at once.

        Returns:
            A function that waits for the engines and returns their pids by their numbers in ipyparallel. It
            raises OSError if the host fails.
        """
        request = self.tell(Call.FORK_ON_HOST, [next(self._numbers) for _ in range(num)])

        def wait_for_pids() -> dict[int, int]:
            pids: dict[int, int] = self.answer(request, _FORK_PATIENCE_S)
            # An earlier engine may have had the same pid.
            for pid in pids.values():
                self._endings.pop(pid, None)
                self._registered.discard(pid)
            self._number_of |= {pid: number for number, pid in pids.items()}
            return pids

        return wait_for_pids

    def fork_engine(self, take: Callable[[int, int], None]) -> None:
        """Let the host fork one more engine, and call `take` with its pid and its number in ipyparallel."""
        ((number, pid),) = self.fork_engines(1)().items()
        take(pid, number)

    def prepare_to_train(self, recipes: Sequence[str]) -> None:
        """Let the fork server import what later engines need to train, and return at once."""
        self._send_if_connected("prepare_to_train", list(recipes))

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to those of these engines that are alive."""
        alive = [pid for pid in pids if pid not in self._endings]
        if alive:
            self._send_if_connected("send_signal", alive, int(number))

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
        """Whether an engine has ended, without a message to its host: the controller has unregistered it."""
        if self._number_of.get(pid) in self._client.ids:
            self._registered.add(pid)
            return False
        return pid in self._registered or not self.is_there

    def glance(self, pid: int) -> _Glance:
        """Make an object that tells fast, and often, whether an engine has ended."""
        return _Glance(self, pid)

    def how_ended(self, pid: int) -> ExitStatus | None:
        """The exit status of an engine; None while it lives."""
        if pid in self._endings:
            return self._endings[pid]
        if self._number_of.get(pid) in self._client.ids:
            self._registered.add(pid)
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
        """The number of engines whose end is recorded."""
        return int(self._ask("num_ended"))

    def standstill(self, pid: int) -> str:
        """Say why a living process is kept from running, such as by SIGSTOP, and the remedy; empty if nothing
        keeps it."""
        reason = self._ask_quickly("standstill", pid)
        return f"on host {self.name} {reason}" if reason else ""

    def resident_bytes(self, pid: int) -> int | None:
        """The memory that a process has in RAM; None if it has ended."""
        used: int | None = self._ask_quickly("resident_bytes", pid)
        return used

    def core_uses(self, pids: Sequence[int]) -> dict[int, CoreUse]:
        """How long each process has used and waited for CPU cores; one that has ended is left out."""
        uses = self._ask_quickly("core_uses", list(pids)) or {}
        return {pid: CoreUse(*used) for pid, used in uses.items()}

    def stacks(self) -> _Stacks:
        """Make an object that asks ranks what their main threads do. The caller closes it."""
        return _Stacks(self)

    def questions(self) -> _Questions:
        """Begin to take the questions that ranks ask with `input()`, and return the object that has them. The
        caller closes it."""
        return _Questions(self)

    def log_tail(self, whose: Whose = "engines") -> str:
        """The last lines of a log, as sentences for an error message."""
        try:
            return f"On host {self.name}: {self._ask('log_tail', whose)}"
        except OSError as error:
            return f"{error}."

    def end(self) -> None:
        """Let the host end all of its processes of the cluster, and return at once."""
        if self.is_there:
            self.tell(Call.END_HOST_SOON)


class _Glance:
    """An `ExitProbe` for an engine of another host; see `OtherHost.is_ending`."""

    def __init__(self, host: OtherHost, pid: int) -> None:
        self._host = host
        self._pid = pid

    def is_ending(self) -> bool:
        return self._host.is_ending(self._pid)

    def close(self) -> None:
        pass


class _Look(NamedTuple):
    """What a host answers about one rank (`look` in engine/process/host_calls.py)."""

    state_fields: dict[str, Any] | None = None
    """The fields of the rank's `MainThreadState`; None if the rank has not answered."""
    computes: bool | None = False
    waits_in_the_system: bool = False
    standstill: str = ""


class _Stacks:
    """A `StackReader` for the ranks of another host, which asks for all of them with one message."""

    def __init__(self, host: OtherHost) -> None:
        self._host = host
        self._name = secrets.token_hex(8)
        """Identifies this object to the host, which keeps the open requests of each asker."""
        self._request: Any = None
        """The request that the host has not answered yet."""
        self._sent_mono_s = 0.0
        """When the last request was sent."""
        self._asked_mono_s: dict[int, float] = {}
        """When each rank that owes an answer was asked first, by pid."""
        self._looks: dict[int, _Look] = {}
        """The host's last answer, by pid."""

    def ask(self, pids: Iterable[int]) -> None:
        if self._request is not None or not self._host.is_there:
            return
        for pid in pids:
            self._asked_mono_s.setdefault(pid, time.monotonic())
        self._request = self._host.tell(Call.LOOK_ON_HOST, list(pids), _LOOK_S, self._name)
        self._sent_mono_s = time.monotonic()

    def collect(self, patience_s: float = 0.0) -> dict[int, MainThreadState]:
        if self._request is None or not self._request.wait(patience_s):
            return {}
        request, self._request = self._request, None
        if not request.successful():  # the host is lost
            return {}
        self._looks = {pid: _Look(*values) for pid, values in request.get().items()}
        states = {
            pid: MainThreadState(**look.state_fields)
            for pid, look in self._looks.items()
            if look.state_fields is not None
        }
        for pid in states:
            self._asked_mono_s.pop(pid, None)
        return states

    def silent_s(self, pid: int) -> float:
        asked_mono_s = self._asked_mono_s.get(pid)
        return 0.0 if asked_mono_s is None else time.monotonic() - asked_mono_s

    def computes(self, pid: int) -> bool | None:
        return self._looks.get(pid, _Look()).computes

    def waits_in_the_system(self, pid: int) -> bool:
        return self._looks.get(pid, _Look()).waits_in_the_system

    def standstill(self, pid: int) -> str:
        silent_s = time.monotonic() - self._sent_mono_s
        if self._request is not None and silent_s > _HOST_SILENT_S:
            # Nothing is known of the rank then.
            return f"host {self._host.name} is not heard for {silent_s:.0f} s"
        return self._looks.get(pid, _Look()).standstill

    def cell_line(self, pid: int) -> int | None:
        try:
            line: int | None = self._host.answer(
                self._host.tell(Call.CELL_LINE_ON_HOST, pid), _LINE_PATIENCE_S
            )
        except OSError:
            return None
        return line

    def close(self) -> None:
        self._request = None


class _Questions:
    """Takes the `input()` questions of the ranks of another host, as `nbgpu.host.questions.Listener` does
    for those of this host. The host is asked for them only when a rank has announced one, while one is open,
    or once in a while.

    Args:
        host: the host.
    """

    def __init__(self, host: OtherHost) -> None:
        self._host = host
        self._request: Any = None
        """The request for the open questions that the host has not answered yet."""
        self._is_announced = False
        """Whether a rank has announced a question, and no request that was sent after that is answered."""
        self._is_sent_after_announcement = False
        """Whether the answer to the request will contain that question."""
        self._called_mono_s = self._looked_mono_s = time.monotonic()
        """When `look` was called last, and when the host was asked last."""
        self._open: dict[int, Question] = {}
        """The open questions by number, as the host named them last."""
        self._answered: set[int] = set()
        """The numbers of the answered questions, which a late answer of the host may still contain."""
        self._may_be_open = False
        """Whether a rank has announced a question since the last `refuse`."""
        # Wait, because a rank may ask at once. If the host is lost, the cell reports it.
        with suppress(OSError):
            host.answer(self._send("open"))

    def _send(self, method: str, *args: Any) -> Any:
        return self._host.tell(Call.QUESTIONS_ON_HOST, method, *args)

    def look(self, soon: bool = False) -> dict[int, Question]:
        """Return the open questions, by number, as they were a moment ago.

        Args:
            soon: whether a rank has announced a question; this then waits a moment for it.
        """
        self._is_announced = self._is_announced or soon
        self._may_be_open = self._may_be_open or soon
        give_up_s = time.monotonic() + _QUESTION_PATIENCE_S
        self._receive_answer(0)
        while self._ask_if_due() and self._is_announced:
            self._receive_answer(give_up_s - time.monotonic())
            if time.monotonic() > give_up_s:
                break
        return self._open

    def _ask_if_due(self) -> bool:
        """Ask the host for its open questions if it is time to; return whether it owes an answer."""
        now_s = time.monotonic()
        if now_s - self._called_mono_s > _QUESTIONS_PERIOD_S:  # the first call in another cell
            self._looked_mono_s = now_s
        self._called_mono_s = now_s
        is_due = self._is_announced or self._open or now_s - self._looked_mono_s > _QUESTIONS_PERIOD_S
        if self._request is None and is_due and self._host.is_there:
            self._looked_mono_s = now_s
            self._request, self._is_sent_after_announcement = self._send("look"), self._is_announced
        return self._request is not None

    def _receive_answer(self, patience_s: float) -> None:
        """Take over the open questions if the host's answer arrives within the patience."""
        if self._request is None or not self._request.wait(max(0.0, patience_s)):
            return
        request, self._request = self._request, None
        if self._is_sent_after_announcement:
            self._is_announced = False
        questions = request.get() if request.successful() else {}
        self._open = {n: Question(**fields) for n, fields in questions.items() if n not in self._answered}

    def answer(self, number: int, text: str) -> None:
        """Answer a question."""
        if self._open.pop(number, None) is not None and self._host.is_there:
            self._answered.add(number)
            self._send("answer", number, text)

    def refuse(self) -> None:
        """End the open questions, with an EOFError on their ranks."""
        if (self._may_be_open or self._open) and self._host.is_there:
            # Wait, so that this does not refuse a question of the next cell.
            self._send("refuse").wait(_REFUSAL_PATIENCE_S)
        self._request, self._open = None, {}
        self._may_be_open = self._is_announced = False

    def close(self) -> None:
        """Take no more questions; afterwards `input()` raises on the ranks."""
        self._request, self._open = None, {}
        if self._host.is_there:
            self._send("close").wait(_REFUSAL_PATIENCE_S)
