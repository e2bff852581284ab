"""What somebody without the keys says to the ports of a cluster, and what a port may answer."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import Any

import zmq

ANSWER_PATIENCE_S = 0.5
GREETING_BYTES = 64
"""What ZMTP sends to whoever connects: its version, and 'CURVE', the name of what it asks for."""

SAYINGS = {
    "nothing, and stays": b"",
    "random bytes": os.urandom(256),
    "a huge length": b"\xff" * 8 + b"\x00" * 8,
    "the first number that gloo expects": (0).to_bytes(8, "little"),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half of a ZMTP greeting": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03",
}


def is_nothing(heard: bytes) -> bool:
    """Whether an answer is none, or the greeting of a port that asks for keys."""
    return not heard or (len(heard) <= GREETING_BYTES and heard[:1] == b"\xff" and b"NULL" not in heard)


def heard_over_tcp(ports: Iterable[int], address: str = "127.0.0.1") -> dict[tuple[int, str], bytes]:
    """What each port answers to each saying."""
    with ExitStack() as stack:
        connections = {}
        for port in ports:
            for name, saying in SAYINGS.items():
                connection = stack.enter_context(socket.create_connection((address, port), timeout=5))
                connection.sendall(saying)
                connections[port, name] = connection
        time.sleep(ANSWER_PATIENCE_S)
        return {key: _received(connection) for key, connection in connections.items()}


def _received(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16)
    except (BlockingIOError, ConnectionResetError):
        return b""


def heard_over_zmq(
    ports: Iterable[int], context: zmq.Context[Any], address: str = "127.0.0.1"
) -> list[tuple[int, str, bytes]]:
    """What each port sends to ZMQ sockets without security, and to ones with a key that is not the
    cluster's."""
    heard = []
    with ExitStack() as stack:
        poller = zmq.Poller()
        whose = {}
        for port in ports:
            for kind in (zmq.SUB, zmq.DEALER, zmq.REQ):
                for secured in (False, True):
                    stranger = stack.enter_context(closing(context.socket(kind)))
                    stranger.linger = 0
                    if secured:
                        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                        stranger.curve_serverkey, _ = zmq.curve_keypair()
                    if kind == zmq.SUB:
                        stranger.subscribe(b"")
                    stranger.connect(f"tcp://{address}:{port}")
                    if kind != zmq.SUB:
                        stranger.send(b"hello")
                    poller.register(stranger, zmq.POLLIN)
                    whose[stranger] = (port, f"{kind.name}, {'wrong key' if secured else 'no security'}")
        give_up_s = time.monotonic() + 2 * ANSWER_PATIENCE_S
        while time.monotonic() < give_up_s:
            heard += [(*whose[s], s.recv()) for s, _ in poller.poll(50)]
    return heard
