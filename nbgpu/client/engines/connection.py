"""ipyparallel's client, extended so that each message of a rank's output is received, in its order.

By itself, ipyparallel gathers a cell's text in one string for each stream. That loses the order between the
streams, drops the text before a carriage return, copies the whole text with each message, and keeps it for
good. ipyparallel also stops gathering when an error's reply overtakes the output printed before the error.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import ipyparallel as ipp
import zmq
from ipyparallel.client.client import Metadata

from nbgpu.client.engines.cell_replies import Answer, Arrivals, Message, TakeLate
from nbgpu.client.engines.cell_socket import CellSocket
from nbgpu.protocol.records import CellOptions, CellOutputs, Remains
from nbgpu.protocol.short_cuts import are_plain

_CURVE_KEYS = ("serverkey", "publickey", "secretkey")
_CELL_MARK = "-cell-"
"""Stands in the id of each request to run a cell, before the rank."""
_NUM_LATE_CELLS = 1000
"""For this many of the newest cells, output that threads and tasks print after the cell's end is received."""


class Client(ipp.Client):  # type: ignore[misc]
    """ipyparallel's client with `send_cell`, whose caller receives the cell's output from the first message
    on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # The constructor starts the thread whose callbacks use these.
        self._cell_sockets: dict[asyncio.AbstractEventLoop, CellSocket] = {}
        self.without_group: set[int] = set()
        """Engines that no longer had a process group at their last answer."""
        self.cut_off: set[int] = set()
        """Engines whose connections to the group were cut at their last answer."""
        self.taken_signals: dict[str, set[int]] = {}
        """By the name of a signal, the engines on which a cell has replaced its handler."""
        self._late: OrderedDict[str, tuple[TakeLate, Collection[int]]] = OrderedDict()
        """For each of the newest cells, by its id: the function that takes its late messages, and the ranks
        that ran it."""
        super().__init__(*args, **options)
        # These replace ipyparallel's tables, which keep an entry for each cell for good, and drop messages
        # that arrive after a cell's end.
        self.metadata = _Requests(Metadata)
        self._futures: dict[str, Any] = _Pending(self._futures, self._deliver_late)

    def send_cell(
        self,
        engines: Mapping[int, int],
        code: str,
        options: CellOptions,
        arrivals: Arrivals,
        is_awaited: bool = False,
    ) -> dict[int, Answer]:
        """Send a cell to engines, to all or to none, and return at once. It does what `view.execute` does, in
        less time.

        Args:
            engines: ipyparallel's number of each engine, by rank.
            code: the cell's text.
            options: the options that are sent with the cell.
            arrivals: the object that gets the messages that the engines publish.
            is_awaited: whether the caller is a coroutine that will leave its event loop free to receive the
                answers.

        Returns:
            The pending answer of each rank, by rank.
        """
        # A cell on the other socket could overtake messages of ipyparallel's thread that are not answered.
        uses_cell_socket = is_awaited and not self.outstanding and not are_plain()
        socket = self._socket_of_this_loop() if uses_cell_socket else None
        # `asdict` would take longer, because it copies each value recursively.
        fields = {name: getattr(options, name) for name in options.__slots__}
        request = self.session.msg(
            "execute_request",
            content={"code": code, "silent": False, "user_expressions": {}},
            metadata={CellOptions.METADATA: fields},
        )
        # The messages for the engines differ only in the id in the header, so the rest is packed once.
        delimiter, _, header, *rest = self.session.serialize(request)
        idents, _ = self._build_targets(list(engines.values()))
        answers, messages = {}, []
        for (rank, engine), ident in zip(engines.items(), idents, strict=True):
            message_id = f"{request['msg_id']}{_CELL_MARK}{rank}"
            rank_header = header.replace(request["msg_id"].encode(), message_id.encode(), 1)
            signature = self.session.sign([rank_header, *rest])
            messages.append([ident, delimiter, signature, rank_header, *rest])
            answers[rank] = self._expect(message_id, rank, arrivals, socket)
            answers[rank].metadata["engine_id"] = engine
            self._outstanding_dict[ident.decode()].add(message_id)
        if arrivals.take_late is not None:
            self._late[request["msg_id"]] = arrivals.take_late, tuple(engines)
            if len(self._late) > _NUM_LATE_CELLS:
                self._late.popitem(last=False)

        if socket is not None:
            socket.send(messages)
            return answers

        def send() -> None:
            for message in messages:
                self._mux_stream.send_multipart(message)

        # ipyparallel's thread is woken once, for all messages: if it was woken for the first one, it would
        # take the GIL while the others are made.
        self._io_loop.add_callback(send)
        return answers

    def _expect(self, message_id: str, rank: int, arrivals: Arrivals, socket: CellSocket | None) -> Answer:
        """Make the pending answer of a rank, and put it into the tables in which ipyparallel looks when the
        rank's engine publishes a message or dies."""

        def forget() -> None:
            for table in (self._futures, self.metadata, self.results):
                table.pop(message_id, None)

        self.metadata[message_id] = Metadata()
        answer = Answer(rank, arrivals, self.metadata[message_id], socket, forget)
        self._futures[message_id] = answer
        self.outstanding.add(message_id)
        return answer

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
            self._cell_sockets[loop] = CellSocket(socket, self._unpack_answer)
        return self._cell_sockets[loop]

    def _unpack_answer(self, parts: list[bytes]) -> None:
        """Unpack an answer and handle it. ipyparallel's own method takes longer, because it inspects the
        signature of its handler each time."""
        _, message = self.session.feed_identities(parts)
        self._handle_execute_reply(self.session.deserialize(message))

    def _deliver_late(self, message: Message) -> None:
        """Pass on output that has arrived after its cell was over."""
        if message["header"]["msg_type"] not in CellOutputs.KINDS:
            return
        cell, _, rank = message["parent_header"]["msg_id"].rpartition(_CELL_MARK)
        if cell in self._late:
            take, ranks = self._late[cell]
            take(int(rank), ranks, message)

    def close(self, linger: int | None = None) -> None:
        """Close the client as ipyparallel does, and the sockets on which cells were sent."""
        for socket in self._cell_sockets.values():
            socket.close()
        super().close(linger)

    def _connect(self, *args: Any, **options: Any) -> None:
        """Connect as ipyparallel does, but close the socket if the controller does not answer. ipyparallel's
        constructor calls this method.

        Raises:
            TimeoutError: the controller does not answer.
        """
        try:
            super()._connect(*args, **options)
        except BaseException:
            self._query_socket.close(linger=0)
            raise

    def _extract_metadata(self, msg: Message) -> Message:
        """Extract the metadata of an answer. ipyparallel calls this method, by this name, with each answer to
        a call."""
        metadata: Message = super()._extract_metadata(msg)
        # There is no id if the engine is not registered any more.
        if (engine := metadata.get("engine_id")) is not None:
            self._note_remains(engine, msg["metadata"])
        return metadata

    def _note_remains(self, engine: int, metadata: Message) -> None:
        """Record what the metadata of an answer says of its engine: that the process group is destroyed or
        cut off, and that signal handlers were replaced. An answer without that says that all is well."""
        fields = metadata.get(Remains.METADATA)
        if fields is None and not self.without_group and not self.cut_off:
            return
        remains = Remains(**(fields or {}))
        for applies, engines in (
            (remains.group_ended, self.without_group),
            (remains.is_cut_off, self.cut_off),
        ):
            if applies:
                engines.add(engine)
            else:
                engines.discard(engine)
        for name in remains.signals:
            self.taken_signals.setdefault(name, set()).add(engine)

    def _handle_execute_reply(self, msg: Message) -> None:
        """Handle the answer to a cell. ipyparallel calls this method, by this name, with each answer on its
        thread."""
        message_id = msg["parent_header"]["msg_id"]
        if _CELL_MARK not in message_id:
            super()._handle_execute_reply(msg)
            return
        metadata, content = msg["metadata"], msg["content"]
        self.outstanding.discard(message_id)
        self._outstanding_dict[metadata.get("engine")].discard(message_id)
        # An engine that was reported as dead may answer all the same.
        if message_id in self._futures:
            answer = self._futures[message_id]
            self._note_remains(answer.metadata["engine_id"], metadata)
            answer.complete(_outcome(message_id, content), metadata.get(CellOutputs.NUM))


class _Requests(defaultdict[str, Message]):
    """ipyparallel's metadata of each request, by the request's id.

    ipyparallel looks up the request of each message, and a defaultdict would add the missing ones. A cell of
    which a message arrives after its end would then be kept for good.
    """

    def __missing__(self, message_id: str) -> Message:
        return Metadata() if _CELL_MARK in message_id else super().__missing__(message_id)


class _Pending(dict[str, Any]):
    """ipyparallel's pending requests, by id. ipyparallel calls `get` for the request of each message."""

    def __init__(self, pending: Mapping[str, Any], take_late: Callable[[Message], None]) -> None:
        super().__init__(pending)
        self._ended_cell = SimpleNamespace(iopub_callbacks=[take_late])

    def get(self, message_id: str | None, default: Any = None) -> Any:
        """Return the pending request. For a cell that is over, return an object whose callback takes late
        messages."""
        if message_id is None or message_id in self or _CELL_MARK not in message_id:
            return super().get(message_id, default)  # type: ignore[arg-type]
        return self._ended_cell


def _outcome(message_id: str, content: Message) -> Any:
    """The execution count in an engine's answer, or the exception."""
    match content["status"]:
        case "ok":
            return content["execution_count"]
        case "aborted":
            return ipp.error.TaskAborted(message_id)
        case _:
            return ipp.error.unwrap_exception(content)
