"""Collects what the ranks send back while they run a cell: their output, message by message, and their
answers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from nbgpu.protocol.records import CellOutputs

if TYPE_CHECKING:
    from nbgpu.client.engines.cell_socket import CellSocket

_POLL_PERIOD_S = 0.1

Message = dict[str, Any]
"""A message of the Jupyter protocol, as it arrived on iopub."""

TakeLate = Callable[[int, Collection[int], Message], None]
"""Takes a rank's number, the numbers of all ranks that ran the cell, and a message of the rank."""


class Arrivals:
    """The output of one cell. ipyparallel's thread fills it, and the cell empties it."""

    def __init__(self) -> None:
        self.take_late: TakeLate | None = None
        """Takes the messages that come once the cell is over; they are dropped where it is None."""
        self._came: deque[tuple[int, Message]] = deque()
        self._news = threading.Condition()
        """Notified when a rank has answered or all of its output is here. One for all ranks, because a lock
        takes longer to make than the request takes to send."""
        self._answers: dict[int, Answer] = {}
        self._num_came: dict[int, int] = {}
        self._num_in_all: dict[int, int] = {}
        """The number of messages of each rank that has answered."""
        self._ended: set[int] = set()

    def add(self, rank: int, message: Message) -> None:
        """Add a message with output that no answer is expected for."""
        self._came.append((rank, message))

    def take(self) -> list[tuple[int, Message]]:
        """Return a pair (rank, message) for each message that has come since the last call."""
        # The other thread may append messages meanwhile.
        return [self._came.popleft() for _ in range(len(self._came))]

    @property
    def are_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._came

    def wait_for_ends(self, ranks: Collection[int], patience_s: float) -> set[int]:
        """Wait until all output of these ranks, which have ended the cell, is here; return the ranks from
        whose output something is missing after `patience_s` in which nothing has come.

        The result may overtake the output, which takes another socket: on a busy machine by seconds.
        """
        num_came = -1
        with self._news:
            while not self._ended.issuperset(ranks) and num_came < (num_came := sum(self._num_came.values())):
                self._news.wait_for(lambda: self._ended.issuperset(ranks), patience_s)
            return set(ranks) - self._ended

    def has_ended(self, rank: int) -> bool:
        """Return whether everything that the rank printed in the cell is here."""
        return rank in self._ended

    def close(self) -> None:
        """Stop expecting output, so that ipyparallel may forget the cell even if a rank died in it."""
        for rank in self._answers.keys() - self._ended:
            self._end(rank)

    def _expect(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = answer
        self._num_came[rank] = 0

    def _receive(self, rank: int, message: Message) -> None:
        """Receive what a rank publishes: its output, and that it is idle."""
        kind = message["header"]["msg_type"]
        if kind in CellOutputs.KINDS:
            self.add(rank, message)
            self._num_came[rank] += 1
            self._end_if_all_came(rank)
        elif kind == "status" and message["content"]["execution_state"] == "idle":
            self._end(rank)

    def _note_answer(self, rank: int, num_outputs: int) -> None:
        """Note that a rank has answered, and how many messages with output it has sent in all."""
        self._num_in_all[rank] = num_outputs
        self._end_if_all_came(rank)

    def _end_if_all_came(self, rank: int) -> None:
        if rank in self._num_in_all and self._num_came[rank] >= self._num_in_all[rank]:
            self._end(rank)

    def _end(self, rank: int) -> None:
        with self._news:
            self._ended.add(rank)
            self._news.notify_all()
        self._answers[rank].forget_if_over()


class Answer:
    """A rank's pending answer to a cell: what cells need of ipyparallel's AsyncResult, and what its client
    needs of the future that it keeps for a request.

    An AsyncResult has seven locks, and takes longer to make than the request takes to send.

    Args:
        rank: the rank that is to answer.
        arrivals: the object that gets what the rank publishes.
        metadata: what ipyparallel knows of the request.
        socket: the socket on which the answer comes, unless it comes to ipyparallel's thread.
        forget: a function that makes ipyparallel forget the request.
    """

    def __init__(
        self,
        rank: int,
        arrivals: Arrivals,
        metadata: Message,
        socket: CellSocket | None,
        forget: Callable[[], None],
    ) -> None:
        self.metadata = metadata
        self.iopub_callbacks = [self._receive]
        """ipyparallel calls these with each message that the rank publishes."""
        self._rank = rank
        self._arrivals = arrivals
        self._socket = socket
        self._forget = forget
        self._news = arrivals._news
        self._outcome: Any = None
        self._is_here = False
        self._callbacks: deque[Callable[[Answer], object]] = deque()
        arrivals._expect(rank, self)

    def ready(self) -> bool:
        """Return whether the rank has answered."""
        if not self._is_here and self._socket is not None and self._socket.is_of_this_thread:
            self._socket.poll()
        return self._is_here

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the answer, at most `timeout_s`; return whether it came."""
        if self._is_here:
            return True
        if self._socket is None or not self._socket.is_of_this_thread:
            with self._news:
                return self._news.wait_for(lambda: self._is_here, timeout_s)
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_here:
            left_s = max(0.0, give_up_s - time.monotonic())
            # Wait in slices, because the news that the engine has died arrives on ipyparallel's thread.
            self._socket.poll(min(left_s, _POLL_PERIOD_S))
            if not left_s:
                break
        return self._is_here

    def result(self) -> Any:
        """Return IPython's number of the cell on the rank; raise the cell's exception."""
        self.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def exception(self) -> Exception | None:
        """Wait for the answer and return the cell's exception."""
        self.wait()
        return self._outcome if isinstance(self._outcome, Exception) else None

    def add_done_callback(self, tell: Callable[[Answer], object]) -> None:
        """Call `tell` when the answer is there, on the thread that receives it, or at once if it is there
        already."""
        self._callbacks.append(tell)
        if self._is_here:
            self._notify_all()

    def complete(self, outcome: Any, num_outputs: int | None) -> None:
        """Complete this pending answer with what the rank has sent.

        Args:
            outcome: IPython's number of the cell on the rank, or an exception.
            num_outputs: the number of messages with output that the rank has published in the cell; None for
                a rank that refused the cell, which says that it is idle.
        """
        if num_outputs is not None:
            self._arrivals._note_answer(self._rank, num_outputs)
        self.set_result(outcome)

    def set_result(self, outcome: Any) -> None:
        """Set the outcome, and wake whoever waits for it. Later calls do nothing.

        ipyparallel, which gave the name, calls this with an error when the engine has died.
        """
        with self._news:
            if self._is_here:
                return
            self._outcome, self._is_here = outcome, True
            self._news.notify_all()
        self._notify_all()
        self.forget_if_over()

    def _notify_all(self) -> None:
        while self._callbacks:
            try:
                tell = self._callbacks.popleft()
            except IndexError:
                return  # another thread, which does the same at this moment, has taken the last
            tell(self)

    def forget_if_over(self) -> None:
        """Have the request forgotten if the answer and all output is here."""
        if self._is_here and self._arrivals.has_ended(self._rank):
            self._forget()

    def _receive(self, message: Message) -> None:
        # The text that ipyparallel gathers would grow for as long as the rank prints.
        self.metadata["stdout"] = self.metadata["stderr"] = ""
        self.metadata["outputs"].clear()
        self._arrivals._receive(self._rank, message)
