"""What the ranks print and display, taken one message at a time and in the order in which it comes.

ipyparallel by itself gathers a cell's text in one string for each stream. That forgets what came before what, drops what
stands before a carriage return, copies the whole text with each message, and keeps it for good. It also stops
gathering when an error's reply overtakes what was printed before the error.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from typing import Any

import ipyparallel as ipp
import zmq
from tornado.ioloop import IOLoop
from tornado.platform.asyncio import AsyncIOLoop

from nbgpu.client.engines.cell_socket import CellSocket
from nbgpu.protocol.plain_cells import are_plain
from nbgpu.protocol.records import CellOptions, CellOutputs, Remains

_POLL_PERIOD_S = 0.1
_CURVE_KEYS = ("serverkey", "publickey", "secretkey")

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
        """The answer and the output that belongs to it may come on two threads, and ipyparallel's own record of what is still to
        come is made for one."""
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


_listener: ContextVar[tuple[Arrivals, int] | None] = ContextVar("nbgpu_listener", default=None)


class _Loop(AsyncIOLoop):
    """The loop of ipyparallel's thread. Woken for the first of several requests, the thread would hold up the one that
    prepares the others, and the last rank would begin late."""

    @contextmanager
    def at_once(self, here: bool) -> Iterator[None]:
        """What the calling thread hands to the loop meanwhile is done in the end, without a pause, by the loop or `here`; nothing of
        it after an exception."""
        held: list[Callable[[], object]] = []
        token = _held.set(held)
        try:
            yield
        finally:
            _held.reset(token)
        if here:
            for callback in held:
                callback()
        else:
            super().add_callback(lambda: [callback() for callback in held])

    def add_callback(self, callback: Callable[..., object], *args: Any, **options: Any) -> None:
        """Called by ipyparallel and pyzmq."""
        held = _held.get()
        if held is None:
            super().add_callback(callback, *args, **options)
        else:
            held.append(partial(callback, *args, **options))


_held: ContextVar[list[Callable[[], object]] | None] = ContextVar("nbgpu_held", default=None)


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

    def add_done_callback(self, tell: Callable[[Answer], None]) -> None:
        """Calls `tell` when the answer is there, on the thread that takes it; at once where it is."""
        self._future.add_done_callback(lambda _: tell(self))


class Client(ipp.Client):  # type: ignore[misc]
    """ipyparallel's client, in which a cell's output can be listened to from before the cell is sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._cell_sockets: dict[asyncio.AbstractEventLoop, CellSocket] = {}
        self.without_group: set[int] = set()
        """Engines that had no process group any more when they answered last."""
        self.taken_signals: dict[str, set[int]] = {}
        """By the name of a signal, the engines whose handlers a cell has replaced."""
        super().__init__(*args, **options)

    def send_cell(
        self,
        engines: Mapping[int, int],
        code: str,
        options: CellOptions,
        arrivals: Arrivals,
        is_awaited: bool = False,
    ) -> dict[int, Answer]:
        """Sends a cell to engines as `view.execute` does, to all or to none, and returns at once.

        Args:
            engines: by rank, ipyparallel's number of its engine.
            code: the cell's text.
            options: sent along.
            arrivals: gets what the engines publish.
            is_awaited: the caller is a coroutine, and will leave its event loop free to take the answers.

        Returns:
            By rank, what will hold its end.
        """
        # What was sent before by ipyparallel's thread, and is still on its way, must not be overtaken.
        takes_own_way = is_awaited and not self.outstanding and not are_plain()
        socket = self._socket_of_this_loop() if takes_own_way else None
        metadata = {CellOptions.METADATA: asdict(options)}
        idents, _ = self._build_targets(list(engines.values()))
        answers = {}
        with self._io_loop.at_once(here=socket is not None):
            for rank, ident in zip(engines, idents, strict=True):
                token = _listener.set((arrivals, rank))
                try:
                    future = self.send_execute_request(
                        socket or self._mux_stream, code, silent=False, metadata=metadata, ident=ident
                    )
                finally:
                    _listener.reset(token)
                answers[rank] = Answer(future, self.metadata[future.msg_id], socket)
        return answers

    def _socket_of_this_loop(self) -> CellSocket:
        """Made for the first cell that is awaited: who sends none has no use for it."""
        loop = asyncio.get_running_loop()
        if loop not in self._cell_sockets:
            socket = self._context.socket(zmq.DEALER)
            # The controller's records take it for text.
            socket.setsockopt_string(zmq.IDENTITY, f"{self.session.session}-cells-{len(self._cell_sockets)}")
            keys = {f"curve_{kind}": getattr(self, f"curve_{kind}") for kind in _CURVE_KEYS}
            ipp.util.connect(socket, self._config["mux"], **keys)
            self._cell_sockets[loop] = CellSocket(socket, self._take_answer)
        return self._cell_sockets[loop]

    def _take_answer(self, parts: list[zmq.Frame]) -> None:
        """ipyparallel's own way to unpack looks up each time how its method is called."""
        _, message = self.session.feed_identities(parts, copy=False)
        self._handle_execute_reply(self.session.deserialize(message, copy=False))

    def close(self, linger: int | None = None) -> None:
        """As ipyparallel's."""
        for socket in self._cell_sockets.values():
            socket.close()
        super().close(linger)

    def _connect(self, *args: Any, **options: Any) -> None:
        """Called by ipyparallel; TimeoutError where the controller does not answer, and nothing is left of the try."""
        try:
            super()._connect(*args, **options)
        except BaseException:
            self._query_socket.close(linger=0)
            raise

    def _make_io_loop(self) -> IOLoop:
        """Called by ipyparallel for the loop of its thread."""
        loop: IOLoop = _Loop(make_current=False)
        return loop

    def create_message_futures(
        self, msg_id: str, header: Message, async_result: bool = False, **options: Any
    ) -> list[Future[Any]]:
        """Called by ipyparallel for each request, just before that is sent."""
        listener = _listener.get()
        # The second future of an AsyncResult, which waits for 'idle', is replaced by the listener's own.
        futures: list[Future[Any]] = super().create_message_futures(
            msg_id, header, async_result=async_result and listener is None, **options
        )
        if listener is None:
            return futures
        futures[0].listener = arrivals, rank = listener  # type: ignore[attr-defined]
        gathered = self.metadata[msg_id]

        def receive(message: Message) -> None:
            # What ipyparallel gathers would grow for as long as the rank prints.
            gathered["stdout"] = gathered["stderr"] = ""
            gathered["outputs"].clear()
            arrivals._receive(rank, message)

        futures[0].iopub_callbacks.append(receive)  # type: ignore[attr-defined]
        # ipyparallel goes on listening until all of these are done.
        return [*futures, arrivals._expect(rank)]

    def _extract_metadata(self, msg: Message) -> Message:
        """Called by ipyparallel with each answer, of a cell or a call; the name is ipyparallel's."""
        metadata: Message = super()._extract_metadata(msg)
        remains = msg["metadata"].get(Remains.METADATA)
        if remains is not None or self.without_group:
            self._note_remains(metadata["engine_id"], Remains(**(remains or {})))
        return metadata

    def _note_remains(self, engine: int, remains: Remains) -> None:
        if remains.group_ended:
            self.without_group.add(engine)
        else:
            self.without_group.discard(engine)
        for name in remains.signals:
            self.taken_signals.setdefault(name, set()).add(engine)

    def _handle_execute_reply(self, msg: Message) -> None:
        """Called by ipyparallel's thread with each answer; the name is ipyparallel's."""
        future = self._futures.get(msg["parent_header"]["msg_id"])
        if (listener := getattr(future, "listener", None)) is None:
            super()._handle_execute_reply(msg)
            return
        arrivals, rank = listener
        with arrivals._settling():
            arrivals._is_answered(rank, msg)
            super()._handle_execute_reply(msg)


def _resolve(end: Future[None]) -> None:
    if not end.done():
        end.set_result(None)
