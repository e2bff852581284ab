"""Collects what the ranks send back while they run a cell: their output, message by message, and their
answers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbgpu.protocol.records import CellOutputs

if TYPE_CHECKING:
    from nbgpu.client.engines.cell_socket import CellSocket

_POLL_PERIOD_S = 0.1

Message = dict[str, Any]
"""A message of the Jupyter protocol, as it arrived on iopub."""


class Arrivals:
    """The output of one cell. ipyparallel's thread fills it, and the cell empties it."""

    def __init__(self) -> None:
        self._came: deque[tuple[int, Message]] = deque()
        self._quiet = threading.Condition()
        self._ends: dict[int, Future[None]] = {}
        self._num_came: dict[int, int] = {}
        self._num_in_all: dict[int, int] = {}
        """The number of messages of each rank that has answered."""

    def take(self) -> list[tuple[int, Message]]:
        """Return a pair (rank, message) for each message that has come since the last call."""
        # The other thread may append messages meanwhile.
        return [self._came.popleft() for _ in range(len(self._came))]

    @property
    def are_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._came

    def wait_for_ends(self, ranks: Collection[int], patience_s: float) -> None:
        """Wait, at most `patience_s`, until all output of these ranks, which have ended the cell, is here.

        The result may overtake the output, which takes another socket.
        """
        give_up_s = time.monotonic() + patience_s
        with self._quiet:
            self._quiet.wait_for(
                lambda: all(self.has_ended(rank) for rank in ranks), max(0.0, give_up_s - time.monotonic())
            )

    def has_ended(self, rank: int) -> bool:
        """Return whether everything that the rank printed in the cell is here."""
        return rank in self._ends and self._ends[rank].done()

    def close(self) -> None:
        """Stop expecting output, so that ipyparallel may forget the cell even if a rank died in it."""
        with self._quiet:
            for end in self._ends.values():
                _resolve(end)

    def _expect(self, rank: int) -> Future[None]:
        self._ends[rank] = Future()
        self._num_came[rank] = 0
        return self._ends[rank]

    def _receive(self, rank: int, message: Message) -> None:
        kind = message["header"]["msg_type"]
        if kind in CellOutputs.KINDS:
            self._came.append((rank, message))
            self._num_came[rank] += 1
            self._end_if_all_came(rank)
        elif kind == "status" and message["content"]["execution_state"] == "idle":
            self._end(rank)

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Hold the lock that protects ipyparallel's own record of pending messages.

        The answer and the output that belongs to it may come on two threads, and that record is made for one.
        """
        with self._quiet:
            yield

    def _is_answered(self, rank: int, answer: Message) -> None:
        # A rank that refused the cell gives no number, and says that it is idle.
        if CellOutputs.NUM in answer["metadata"]:
            self._num_in_all[rank] = answer["metadata"][CellOutputs.NUM]
            self._end_if_all_came(rank)

    def _end_if_all_came(self, rank: int) -> None:
        if rank in self._num_in_all and self._num_came[rank] >= self._num_in_all[rank]:
            self._end(rank)

    def _end(self, rank: int) -> None:
        with self._quiet:
            _resolve(self._ends[rank])
            self._quiet.notify_all()


class Answer:
    """A rank's pending answer to a cell, with as much of ipyparallel's AsyncResult as cells need.

    An AsyncResult has seven locks, and takes longer to make than the request takes to send.

    Args:
        future: ipyparallel's future.
        gathered: what ipyparallel knows of the request.
        socket: the socket on which the answer comes, unless it comes to ipyparallel's thread.
    """

    def __init__(self, future: Any, gathered: Message, socket: CellSocket | None) -> None:
        self._future = future
        self._socket = socket
        self.metadata = gathered

    def ready(self) -> bool:
        """Return whether the rank has answered."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the answer, at most `timeout_s`; return whether it came."""
        if self._socket is None or not self._socket.is_of_this_thread:
            return bool(self._future.wait(timeout_s))
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._future.done():
            left_s = max(0.0, give_up_s - time.monotonic())
            # Wait in slices, because the news that the engine has died arrives on ipyparallel's thread.
            self._socket.poll(min(left_s, _POLL_PERIOD_S))
            if not left_s:
                break
        return bool(self._future.done())

    def result(self) -> Any:
        """Return ipyparallel's reply; raise the cell's exception."""
        self.wait()
        answer = self._future.result()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def exception(self) -> Exception | None:
        """Wait for the answer and return the cell's exception."""
        self.wait()
        answer = self._future.result()
        return answer if isinstance(answer, Exception) else None

    def add_done_callback(self, tell: Callable[[Answer], object]) -> None:
        """Call `tell` when the answer is there, on the thread that receives it, or at once if it is there
        already."""
        self._future.add_done_callback(lambda _: tell(self))


def _resolve(end: Future[None]) -> None:
    if not end.done():
        end.set_result(None)
