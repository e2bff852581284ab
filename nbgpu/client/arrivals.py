"""What the ranks print and display, taken one message at a time and in the order in which it comes.

ipyparallel by itself gathers a cell's text in one string for each stream. That forgets what came before what, drops what
stands before a carriage return, copies the whole text with each message, and keeps it for good. It also stops
gathering when an error's reply overtakes what was printed before the error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

import ipyparallel as ipp

from nbgpu.records import CellOptions

Message = dict[str, Any]
"""A message of the Jupyter protocol, as it came on iopub."""

_KINDS = ("stream", "display_data", "update_display_data", "execute_result")


class Arrivals:
    """The output of one cell. ipyparallel's thread fills it, the cell empties it."""

    def __init__(self) -> None:
        self._came: deque[tuple[int, Message]] = deque()
        self._quiet = threading.Condition()
        self._ends: dict[int, Future[None]] = {}

    def take(self) -> list[tuple[int, Message]]:
        """(rank, message) of all that came since the last call."""
        # The other thread may add to it meanwhile.
        return [self._came.popleft() for _ in range(len(self._came))]

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
        return self._ends[rank]

    def _receive(self, rank: int, message: Message) -> None:
        kind = message["header"]["msg_type"]
        if kind in _KINDS:
            self._came.append((rank, message))
        elif kind == "status" and message["content"]["execution_state"] == "idle":
            with self._quiet:
                _resolve(self._ends[rank])
                self._quiet.notify_all()


_listener: ContextVar[tuple[Arrivals, int] | None] = ContextVar("nbgpu_listener", default=None)


@contextmanager
def listening(arrivals: Arrivals | None, rank: int) -> Iterator[None]:
    """The output of what is sent meanwhile goes to `arrivals`, as the rank's; None changes nothing."""
    token = _listener.set(None if arrivals is None else (arrivals, rank))
    try:
        yield
    finally:
        _listener.reset(token)


_sent_along: ContextVar[CellOptions | None] = ContextVar("nbgpu_sent_along", default=None)


@contextmanager
def sent_along(options: CellOptions) -> Iterator[None]:
    """Cells that are sent meanwhile go with these options."""
    token = _sent_along.set(options)
    try:
        yield
    finally:
        _sent_along.reset(token)


class Client(ipp.Client):  # type: ignore[misc]
    """ipyparallel's client, in which a cell's output can be listened to from before the cell is sent."""

    def send_execute_request(
        self, socket: Any, code: str, silent: bool = True, metadata: Message | None = None, **how: Any
    ) -> Any:
        """Called by ipyparallel's views."""
        if (options := _sent_along.get()) is not None:
            metadata = {**(metadata or {}), CellOptions.METADATA: asdict(options)}
        return super().send_execute_request(socket, code, silent=silent, metadata=metadata, **how)

    def create_message_futures(
        self, msg_id: str, header: Message, *args: Any, **kwargs: Any
    ) -> list[Future[Any]]:
        """Called by ipyparallel for each request, just before that is sent."""
        futures: list[Future[Any]] = super().create_message_futures(msg_id, header, *args, **kwargs)
        if (listener := _listener.get()) is None:
            return futures
        arrivals, rank = listener
        gathered = self.metadata[msg_id]

        def receive(message: Message) -> None:
            # What ipyparallel gathers would grow for as long as the rank prints.
            gathered["stdout"] = gathered["stderr"] = ""
            gathered["outputs"].clear()
            arrivals._receive(rank, message)

        futures[0].iopub_callbacks.append(receive)  # type: ignore[attr-defined]
        # ipyparallel goes on listening until all of these are done.
        return [*futures, arrivals._expect(rank)]


def _resolve(end: Future[None]) -> None:
    if not end.done():
        end.set_result(None)
