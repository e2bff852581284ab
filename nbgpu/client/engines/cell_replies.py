"""Collects the output (as Jupyter messages) and the replies of ranks that run a cell."""

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
"""Takes a rank, all ranks that ran the cell, and a message that the rank has sent after the cell's end."""


class Arrivals:
    """The output of one cell: ipyparallel's thread adds messages, and the cell's thread takes them."""

    def __init__(self) -> None:
        self.take_late: TakeLate | None = None
        """Takes the messages that arrive once the cell is over; None drops them."""
        self._messages: deque[tuple[int, Message]] = deque()
        self._news = threading.Condition()
        """Notified when a rank has answered or all of its output is here. One for all ranks, because a lock
        takes longer to make than the request takes to send."""
        self._answers: dict[int, Answer] = {}
        self._num_came: dict[int, int] = {}
        """By rank, the number of messages with output that have arrived."""
        self._num_sent: dict[int, int] = {}
        """By rank, the number of messages with output that it has sent; known once it has answered."""
        self._ended: set[int] = set()
        """The ranks whose output is complete."""

    def add(self, rank: int, message: Message) -> None:
        """Add a message with output."""
        self._messages.append((rank, message))

    def take(self) -> list[tuple[int, Message]]:
        """Return a pair (rank, message) for each message that has arrived since the last call."""
        # The other thread may append messages meanwhile.
        return [self._messages.popleft() for _ in range(len(self._messages))]

    @property
    def are_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._messages

    def wait_for_ends(self, ranks: Collection[int], patience_s: float) -> set[int]:
        """Wait until all output of ranks that have answered is here. The answer may overtake the output,
        which arrives on another socket: on a busy machine by seconds.

        Args:
            ranks: the ranks.
            patience_s: the wait ends when no output has arrived for this time.

        Returns:
            The ranks whose output is not complete.
        """
        with self._news:
            while not self._ended.issuperset(ranks):
                num_before = sum(self._num_came.values())
                self._news.wait_for(lambda: self._ended.issuperset(ranks), patience_s)
                if sum(self._num_came.values()) == num_before:
                    break
            return set(ranks) - self._ended

    def has_ended(self, rank: int) -> bool:
        """Return whether everything that the rank printed in the cell is here."""
        return rank in self._ended

    def close(self) -> None:
        """Expect no more output, so that ipyparallel's client forgets the cell even if a rank died in it."""
        for rank in self._answers.keys() - self._ended:
            self._end(rank)

    def _expect(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = answer
        self._num_came[rank] = 0

    def _receive(self, rank: int, message: Message) -> None:
        """Receive a message that a rank has published: output, or its status."""
        kind = message["header"]["msg_type"]
        if kind in CellOutputs.KINDS:
            self.add(rank, message)
            self._num_came[rank] += 1
            self._end_if_all_came(rank)
        elif kind == "status" and message["content"]["execution_state"] == "idle":
            self._end(rank)

    def _note_answer(self, rank: int, num_outputs: int) -> None:
        """Record that a rank has answered, and how many messages with output it has sent."""
        self._num_sent[rank] = num_outputs
        self._end_if_all_came(rank)

    def _end_if_all_came(self, rank: int) -> None:
        if rank in self._num_sent and self._num_came[rank] >= self._num_sent[rank]:
            self._end(rank)

    def _end(self, rank: int) -> None:
        """Record that a rank's output is complete."""
        with self._news:
            self._ended.add(rank)
            self._news.notify_all()
        self._answers[rank].forget_if_complete()


class Answer:
    """A rank's pending reply to a cell. It replaces ipyparallel's AsyncResult and the future in ipyparallel's
    client: making these, with seven locks, takes longer than sending the request.

    Args:
        rank: the rank that is to answer.
        arrivals: the object that gets the messages that the rank publishes.
        metadata: ipyparallel's record of the request.
        socket: the socket on which the answer arrives; None if it arrives on ipyparallel's thread.
        forget: a function that removes the request from ipyparallel's tables.
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
            # Wait in slices, because the death of the engine is reported on ipyparallel's thread instead.
            self._socket.poll(min(left_s, _POLL_PERIOD_S))
            if not left_s:
                break
        return self._is_here

    def result(self) -> Any:
        """Return IPython's execution count of the cell on the rank, or raise the cell's exception."""
        self.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def exception(self) -> Exception | None:
        """Wait for the answer and return the cell's exception."""
        self.wait()
        return self._outcome if isinstance(self._outcome, Exception) else None

    def add_done_callback(self, tell: Callable[[Answer], object]) -> None:
        """Call `tell` once the answer is here, on the thread that receives it, or at once if it is here
        already."""
        self._callbacks.append(tell)
        if self._is_here:
            self._call_callbacks()

    def complete(self, outcome: Any, num_outputs: int | None) -> None:
        """Set the outcome that the rank has sent.

        Args:
            outcome: IPython's execution count of the cell on the rank, or an exception.
            num_outputs: the number of messages with output that the rank has published in the cell; None if
                the rank refused the cell: its status 'idle' then ends the output.
        """
        if num_outputs is not None:
            self._arrivals._note_answer(self._rank, num_outputs)
        self.set_result(outcome)

    def set_result(self, outcome: Any) -> None:
        """Set the outcome, wake the threads that wait for it, call the callbacks, and let ipyparallel forget
        the request if all output is here, too. Later calls do nothing.

        ipyparallel calls this method, by this name, with an error when the engine has died.
        """
        with self._news:
            if self._is_here:
                return
            self._outcome, self._is_here = outcome, True
            self._news.notify_all()
        self._call_callbacks()
        self.forget_if_complete()

    def _call_callbacks(self) -> None:
        """Call each callback once, even if two threads do this at the same time."""
        while self._callbacks:
            try:
                tell = self._callbacks.popleft()
            except IndexError:
                return  # the other thread has taken the last one
            tell(self)

    def forget_if_complete(self) -> None:
        """Let ipyparallel forget the request if the answer and all output is here."""
        if self._is_here and self._arrivals.has_ended(self._rank):
            self._forget()

    def _receive(self, message: Message) -> None:
        """Receive a message that the rank has published while it runs the cell."""
        # ipyparallel gathers the text here as well, which would grow for as long as the rank prints.
        self.metadata["stdout"] = self.metadata["stderr"] = ""
        self.metadata["outputs"].clear()
        self._arrivals._receive(self._rank, message)
