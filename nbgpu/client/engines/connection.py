"""Receives what the ranks print and display, message by message and in the order in which it arrives.

By itself, ipyparallel gathers a cell's text in one string for each stream. That loses the order between the
streams, drops the text before a carriage return, copies the whole text with each message, and keeps it for
good. ipyparallel also stops gathering when an error's reply overtakes the output printed before the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
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

from nbgpu.client.engines.cell_replies import Answer, Arrivals, Message
from nbgpu.client.engines.cell_socket import CellSocket
from nbgpu.protocol.plain_cells import are_plain
from nbgpu.protocol.records import CellOptions, Remains

_POLL_PERIOD_S = 0.1
_CURVE_KEYS = ("serverkey", "publickey", "secretkey")


_listener: ContextVar[tuple[Arrivals, int] | None] = ContextVar("nbgpu_listener", default=None)


class _Loop(AsyncIOLoop):
    """The loop of ipyparallel's thread, which can be woken once for several requests.

    If it were woken for the first of several requests, the thread would hold up the thread that prepares the
    others, and the last rank would begin late.
    """

    @contextmanager
    def at_once(self, here: bool) -> Iterator[None]:
        """Hold back the callbacks that the calling thread adds to the loop, and run them at the end without a
        pause.

        The callbacks run in the loop or, with `here`, in the calling thread. After an exception none of them
        runs.
        """
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
        """Add a callback, or hold it back within `at_once`; ipyparallel and pyzmq call this."""
        held = _held.get()
        if held is None:
            super().add_callback(callback, *args, **options)
        else:
            held.append(partial(callback, *args, **options))


_held: ContextVar[list[Callable[[], object]] | None] = ContextVar("nbgpu_held", default=None)


class Client(ipp.Client):  # type: ignore[misc]
    """ipyparallel's client, extended so that a caller can listen to a cell's output from before the cell is
    sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._cell_sockets: dict[asyncio.AbstractEventLoop, CellSocket] = {}
        self.without_group: set[int] = set()
        """Engines that no longer had a process group at their last answer."""
        self.taken_signals: dict[str, set[int]] = {}
        """By the name of a signal, the engines on which a cell has replaced its handler."""
        super().__init__(*args, **options)

    def send_cell(
        self,
        engines: Mapping[int, int],
        code: str,
        options: CellOptions,
        arrivals: Arrivals,
        is_awaited: bool = False,
    ) -> dict[int, Answer]:
        """Send a cell to engines as `view.execute` does, to all or to none, and return at once.

        Args:
            engines: ipyparallel's number of each engine, by rank.
            code: the cell's text.
            options: the options that are sent along.
            arrivals: the object that gets the messages that the engines publish.
            is_awaited: whether the caller is a coroutine that will leave its event loop free to receive the
                answers.

        Returns:
            The pending answer of each rank, by rank.
        """
        # The cell must not overtake messages that ipyparallel's thread has sent and that are still on their
        # way.
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
        """Return the socket of the running event loop; make it for the first awaited cell, as other cells do
        not need it."""
        loop = asyncio.get_running_loop()
        if loop not in self._cell_sockets:
            socket = self._context.socket(zmq.DEALER)
            # The identity has to be text, because the controller's records treat it as text.
            socket.setsockopt_string(zmq.IDENTITY, f"{self.session.session}-cells-{len(self._cell_sockets)}")
            keys = {f"curve_{kind}": getattr(self, f"curve_{kind}") for kind in _CURVE_KEYS}
            ipp.util.connect(socket, self._config["mux"], **keys)
            self._cell_sockets[loop] = CellSocket(socket, self._take_answer)
        return self._cell_sockets[loop]

    def _take_answer(self, parts: list[zmq.Frame]) -> None:
        """Unpack an answer. ipyparallel's own way of unpacking looks up each time how its method is
        called."""
        _, message = self.session.feed_identities(parts, copy=False)
        self._handle_execute_reply(self.session.deserialize(message, copy=False))

    def close(self, linger: int | None = None) -> None:
        """Close the client as ipyparallel does, and the sockets of cells."""
        for socket in self._cell_sockets.values():
            socket.close()
        super().close(linger)

    def _connect(self, *args: Any, **options: Any) -> None:
        """Connect as ipyparallel does, which calls this, and clean up if the controller does not answer.

        Raises:
            TimeoutError: the controller does not answer.
        """
        try:
            super()._connect(*args, **options)
        except BaseException:
            self._query_socket.close(linger=0)
            raise

    def _make_io_loop(self) -> IOLoop:
        """Make the loop of ipyparallel's thread; ipyparallel calls this."""
        loop: IOLoop = _Loop(make_current=False)
        return loop

    def create_message_futures(
        self, msg_id: str, header: Message, async_result: bool = False, **options: Any
    ) -> list[Future[Any]]:
        """Make the futures of a request; ipyparallel calls this just before it sends the request."""
        listener = _listener.get()
        # An AsyncResult has a second future, which waits for 'idle'; the listener's own future replaces it.
        futures: list[Future[Any]] = super().create_message_futures(
            msg_id, header, async_result=async_result and listener is None, **options
        )
        if listener is None:
            return futures
        futures[0].listener = arrivals, rank = listener  # type: ignore[attr-defined]
        gathered = self.metadata[msg_id]

        def receive(message: Message) -> None:
            # The text that ipyparallel gathers would grow for as long as the rank prints.
            gathered["stdout"] = gathered["stderr"] = ""
            gathered["outputs"].clear()
            arrivals._receive(rank, message)

        futures[0].iopub_callbacks.append(receive)  # type: ignore[attr-defined]
        # ipyparallel goes on listening until all of these futures are done.
        return [*futures, arrivals._expect(rank)]

    def _extract_metadata(self, msg: Message) -> Message:
        """Extract an answer's metadata; ipyparallel, which gave the name, calls this with each answer of a
        cell or a call."""
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
        """Handle an answer; ipyparallel, which gave the name, calls this on its thread with each answer."""
        future = self._futures.get(msg["parent_header"]["msg_id"])
        if (listener := getattr(future, "listener", None)) is None:
            super()._handle_execute_reply(msg)
            return
        arrivals, rank = listener
        with arrivals._settling():
            arrivals._is_answered(rank, msg)
            super()._handle_execute_reply(msg)
