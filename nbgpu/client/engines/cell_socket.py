"""A connection to the controller that belongs to the event loop in which a cell is awaited.

ipyparallel's client has a thread of its own. For each cell, that thread has to be woken to send, and the
loop's thread to receive the answers, while the two take turns in running Python: this takes a sixth of the
time of an empty cell. Here requests leave and answers arrive on the loop's own thread, through the same
controller and by the same methods of the client.

If that thread does not return to its loop, because it waits in a call, the code that asks for an answer
receives the answers that have come.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import zmq

from nbgpu.machine.signals import uninterrupted

_log = logging.getLogger("nbgpu.cluster")


class CellSocket:
    """A socket that belongs to the thread and the running event loop in which it is made.

    Args:
        socket: a socket that is connected to the controller's scheduler of direct requests.
        dispatch: a function that takes the parts of each message that comes.
    """

    def __init__(self, socket: zmq.Socket[bytes], dispatch: Callable[[list[bytes]], object]) -> None:
        self._socket = socket
        self._dispatch = dispatch
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._is_receiving = False
        self._receive_is_due = False
        self._loop.add_reader(socket.FD, self._receive_all)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether only the calling thread can receive the answers."""
        return threading.get_ident() == self._thread

    def send(self, messages: Iterable[Sequence[bytes]]) -> None:
        """Send messages, each given by its parts."""
        for *parts, last in messages:
            # pyzmq's `send_multipart` takes three times as long: it looks at every part first.
            for part in parts:
                self._socket.send(part, zmq.SNDMORE)
            self._socket.send(last)
        if not self._receive_is_due:
            # The descriptor signals new messages only once, and sending may have used up that signal.
            self._receive_is_due = True
            self._loop.call_soon(self._receive_when_due)

    def _receive_when_due(self) -> None:
        self._receive_is_due = False
        self._receive_all()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Receive the answers that have come, or that come within `timeout_s`. Call on the socket's own
        thread."""
        if self._is_receiving or self._socket.closed:
            return
        if timeout_s > 0.0:
            self._socket.poll(int(1000 * timeout_s))
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            # An interrupt in the middle of an answer would lose it.
            with uninterrupted():
                self._receive_all()

    def _receive_all(self) -> None:
        """Receive all messages that have come, and dispatch each."""
        if self._is_receiving or self._socket.closed:
            return
        self._is_receiving = True
        try:
            while not self._socket.closed:
                parts = self._next_message()
                try:
                    self._dispatch(parts)
                except Exception:  # noqa: BLE001
                    # There is no second signal for the messages behind this one.
                    _log.exception("an answer of a rank could not be taken")
        except zmq.Again:
            pass  # there are no more messages
        finally:
            self._is_receiving = False

    def _next_message(self) -> list[bytes]:
        """Return the parts of a message that has come. Raises zmq.Again if there is none."""
        # pyzmq's `recv_multipart` asks the socket after each part for more; a frame knows whether there is.
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        parts = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(copy=False)
            parts.append(frame.bytes)
        return parts

    def close(self) -> None:
        """Close the socket. Call on any thread; later calls do nothing."""
        if self.is_of_this_thread or self._loop.is_closed():
            self._close()
        else:
            with suppress(RuntimeError):  # the loop has been closed in this moment
                self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        if self._socket.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)
