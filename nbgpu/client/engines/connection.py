"""Receives what the ranks print and display, message by message and in the order in which it arrives.

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
_OF_A_CELL = "-cell-"
"""Part of the id of each request to run a cell."""
_NUM_LATE_CELLS = 1000
"""The number of cells whose threads and tasks may still print something."""


class Client(ipp.Client):  # type: ignore[misc]
    """ipyparallel's client, extended so that a caller can listen to a cell's output from before the cell is
    sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # The constructor starts the thread whose callbacks use these.
        self._cell_sockets: dict[asyncio.AbstractEventLoop, CellSocket] = {}
        self.without_group: set[int] = set()
        """Engines that no longer had a process group at their last answer."""
        self.cut_off: set[int] = set()
        """Engines that were cut off from the others in their group at their last answer."""
        self.taken_signals: dict[str, set[int]] = {}
        """By the name of a signal, the engines on which a cell has replaced its handler."""
        self._late: OrderedDict[str, tuple[TakeLate, Collection[int]]] = OrderedDict()
        """For each of the newest cells, what takes its late messages, and the ranks that ran it."""
        super().__init__(*args, **options)
        # In place of ipyparallel's tables, which would keep an entry for each cell, and no late message.
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
        # By name and not by `asdict`, which would copy each value as if it had parts of its own.
        sent_along = {name: getattr(options, name) for name in options.__slots__}
        request = self.session.msg(
            "execute_request",
            content={"code": code, "silent": False, "user_expressions": {}},
            metadata={CellOptions.METADATA: sent_along},
        )
        # Make a message for each engine, and expect its answer. All ranks get the same one, except for its
        # id: it is made and packed once.
        delimiter, _, header, *rest = self.session.serialize(request)
        idents, _ = self._build_targets(list(engines.values()))
        answers, messages = {}, []
        for (rank, engine), ident in zip(engines.items(), idents, strict=True):
            message_id = f"{request['msg_id']}{_OF_A_CELL}{rank}"
            own_header = header.replace(request["msg_id"].encode(), message_id.encode(), 1)
            signature = self.session.sign([own_header, *rest])
            messages.append([ident, delimiter, signature, own_header, *rest])
            answers[rank] = self._expect(message_id, rank, arrivals, socket)
            answers[rank].metadata["engine_id"] = engine
            self._outstanding_dict[ident.decode()].add(message_id)
        # Threads and tasks of the newest cells may print after their end.
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

        # The thread is woken once, for all ranks: woken for the first of several requests, it would hold up
        # the thread that prepares the others.
        self._io_loop.add_callback(send)
        return answers

    def _expect(self, message_id: str, rank: int, arrivals: Arrivals, socket: CellSocket | None) -> Answer:
        """Make the pending answer of an engine, where ipyparallel looks for it when the engine publishes
        something or dies."""

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
        """Unpack an answer. ipyparallel's own way of unpacking looks up each time how its method is
        called."""
        _, message = self.session.feed_identities(parts)
        self._handle_execute_reply(self.session.deserialize(message))

    def _deliver_late(self, message: Message) -> None:
        """Take a message that came once its cell was over."""
        if message["header"]["msg_type"] not in CellOutputs.KINDS:
            return
        cell, _, rank = message["parent_header"]["msg_id"].rpartition(_OF_A_CELL)
        if cell in self._late:
            take, ranks = self._late[cell]
            take(int(rank), ranks, message)

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

    def _extract_metadata(self, msg: Message) -> Message:
        """Extract an answer's metadata; ipyparallel, which gave the name, calls this with each answer of a
        call."""
        metadata: Message = super()._extract_metadata(msg)
        # None of an engine that is unregistered already.
        if (engine := metadata.get("engine_id")) is not None:
            self._note_remains(engine, msg["metadata"])
        return metadata

    def _note_remains(self, engine: int, metadata: Message) -> None:
        """Note what a cell or a call left broken on its engine, by the metadata of the answer."""
        remains = metadata.get(Remains.METADATA)
        if remains is None and not self.without_group and not self.cut_off:
            return
        left = Remains(**(remains or {}))
        for is_so, engines in ((left.group_ended, self.without_group), (left.is_cut_off, self.cut_off)):
            if is_so:
                engines.add(engine)
            else:
                engines.discard(engine)
        for name in left.signals:
            self.taken_signals.setdefault(name, set()).add(engine)

    def _handle_execute_reply(self, msg: Message) -> None:
        """Handle an answer; ipyparallel, which gave the name, calls this on its thread with each answer."""
        message_id = msg["parent_header"]["msg_id"]
        if _OF_A_CELL not in message_id:
            super()._handle_execute_reply(msg)
            return
        metadata, content = msg["metadata"], msg["content"]
        self.outstanding.discard(message_id)
        self._outstanding_dict[metadata.get("engine")].discard(message_id)
        # An engine that was given up may answer all the same.
        if message_id in self._futures:
            answer = self._futures[message_id]
            self._note_remains(answer.metadata["engine_id"], metadata)
            answer.complete(_outcome(message_id, content), metadata.get(CellOutputs.NUM))


class _Requests(defaultdict[str, Message]):
    """What ipyparallel knows of each request, by the request's id.

    ipyparallel adds the request of each message that it does not know. It would keep a cell for good of which
    a message comes after the cell is forgotten, such as that of its error, which no output follows.
    """

    def __missing__(self, message_id: str) -> Message:
        return Metadata() if _OF_A_CELL in message_id else super().__missing__(message_id)


class _Pending(dict[str, Any]):
    """ipyparallel's pending requests, by id. ipyparallel asks for the one to which a message belongs."""

    def __init__(self, pending: Mapping[str, Any], take_late: Callable[[Message], None]) -> None:
        super().__init__(pending)
        self._over = SimpleNamespace(iopub_callbacks=[take_late])

    def get(self, message_id: str | None, default: Any = None) -> Any:
        """Return the request, and for a cell that is over an object that takes its messages."""
        if message_id is None or message_id in self or _OF_A_CELL not in message_id:
            return super().get(message_id, default)  # type: ignore[arg-type]
        return self._over


def _outcome(message_id: str, content: Message) -> Any:
    match content["status"]:
        case "ok":
            return content["execution_count"]
        case "aborted":
            return ipp.error.TaskAborted(message_id)
        case _:
            return ipp.error.unwrap_exception(content)
