"""A socket to the controller for an event loop in which cells are awaited, without a thread in between.

ipyparallel's client sends and receives on a background thread. Each cell wakes that thread to send and the
event loop to receive, and the two threads take turns in holding the GIL: this takes a sixth of the time of an
empty cell. Here the loop's thread itself sends requests and receives answers, through the same controller
and with the same methods of the client.

If the loop's thread waits in a call and does not return to its loop, the code that asks for an answer
receives the answers that have arrived (`poll`).
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
        socket: a socket that is connected to the controller's scheduler for direct views.
        dispatch: a function that is called with the frames of each message that arrives.
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
            # The descriptor is edge-triggered: it signals new messages once, and sending may consume that.
            self._receive_is_due = True
            self._loop.call_soon(self._receive_when_due)

    def _receive_when_due(self) -> None:
        self._receive_is_due = False
        self._receive_all()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Receive the answers that have arrived, or that arrive within `timeout_s` seconds. Call this on the
        socket's thread."""
        if self._is_receiving or self._socket.closed:
            return
        if timeout_s > 0.0:
            self._socket.poll(int(1000 * timeout_s))
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            # An interrupt in the middle of an answer would lose it.
            with uninterrupted():
                self._receive_all()

    def _receive_all(self) -> None:
        """Receive all messages that have arrived, and dispatch each."""
        if self._is_receiving or self._socket.closed:
            return
        self._is_receiving = True
        try:
            while not self._socket.closed:
                parts = self._next_message()
                try:
                    self._dispatch(parts)
                except Exception:  # noqa: BLE001
                    # Go on: the descriptor does not signal the messages behind this one again.
                    _log.exception("an answer of a rank could not be taken")
        except zmq.Again:
            pass  # there are no more messages
        finally:
            self._is_receiving = False

    def _next_message(self) -> list[bytes]:
        """Return the frames of the next message. Raises zmq.Again if none has arrived."""
        # pyzmq's `recv_multipart` takes longer: it asks the socket after each frame whether there are more.
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
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        """Close the socket on the thread of its loop."""
        if self._socket.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)
