"""What the ranks send back while they run a cell: their output, message by message, and in the end their
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
"""A message of the Jupyter protocol, as it came on iopub."""


class Arrivals:
    """The output of one cell. ipyparallel's thread fills it, the cell empties it."""

    def __init__(self) -> None:
        self._came: deque[tuple[int, Message]] = deque()
        self._quiet = threading.Condition()
        self._ends: dict[int, Future[None]] = {}
        self._num_came: dict[int, int] = {}
        self._num_in_all: dict[int, int] = {}
        """By rank, once it has answered."""

    def take(self) -> list[tuple[int, Message]]:
        """(rank, message) of all that came since the last call."""
        # The other thread may add to it meanwhile.
        return [self._came.popleft() for _ in range(len(self._came))]

    @property
    def are_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._came

    def wait_for_ends(self, ranks: Collection[int], patience_s: float) -> None:
        """Waits until nothing more will come of these ranks, which have ended the cell; at most so long.

        The result may overtake the output, which takes another socket.
        """
        give_up_s = time.monotonic() + patience_s
        with self._quiet:
            self._quiet.wait_for(
                lambda: all(self.has_ended(rank) for rank in ranks), max(0.0, give_up_s - time.monotonic())
            )

    def has_ended(self, rank: int) -> bool:
        """Whether all that the rank printed in the cell is here."""
        return rank in self._ends and self._ends[rank].done()

    def close(self) -> None:
        """Nothing more is expected: ipyparallel may forget the cell, also where a rank died in it."""
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
        """The answer and the output that belongs to it may come on two threads, and ipyparallel's own record
        of what is still to come is made for one."""
        with self._quiet:
            yield

    def _is_answered(self, rank: int, answer: Message) -> None:
        # A rank that refused the cell says no number, and that it is idle.
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
    """What a rank answers to a cell, once it does: as much of ipyparallel's AsyncResult as cells need.

    An AsyncResult has seven locks, and takes longer to make than the request takes to send.

    Args:
        future: ipyparallel's.
        gathered: what ipyparallel knows of the request.
        socket: where it comes, unless it comes to ipyparallel's thread.
    """

    def __init__(self, future: Any, gathered: Message, socket: CellSocket | None) -> None:
        self._future = future
        self._socket = socket
        self.metadata = gathered

    def ready(self) -> bool:
        """Whether the rank has answered."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the answer, at most so long; returns whether it came."""
        if self._socket is None or not self._socket.is_of_this_thread:
            return bool(self._future.wait(timeout_s))
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._future.done():
            left_s = max(0.0, give_up_s - time.monotonic())
            # In slices: that its engine died is told on ipyparallel's thread.
            self._socket.poll(min(left_s, _POLL_PERIOD_S))
            if not left_s:
                break
        return bool(self._future.done())

    def result(self) -> Any:
        """ipyparallel's reply; raises what the cell raised."""
        self.wait()
        answer = self._future.result()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def exception(self) -> Exception | None:
        """What the cell raised; waits for the answer."""
        self.wait()
        answer = self._future.result()
        return answer if isinstance(answer, Exception) else None

    def add_done_callback(self, tell: Callable[[Answer], object]) -> None:
        """Calls `tell` when the answer is there, on the thread that takes it; at once where it is."""
        self._future.add_done_callback(lambda _: tell(self))


def _resolve(end: Future[None]) -> None:
    if not end.done():
        end.set_result(None)
