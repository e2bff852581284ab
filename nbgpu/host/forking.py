"""Requests to the fork server of this host, on a Unix socket in the cluster's folder."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nbgpu.host.launch import REQUESTS_SOCKET
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.cluster_processes import TAKEN

_PATIENCE_S = 60.0
_POLL_PERIOD_S = 0.05


def begin(folder: Path, num_engines: int) -> None:
    """Ask the fork server to fork the first engines when it is ready, and return at once. Does nothing if it
    has ended."""
    with suppress(ConnectionError), socket.socket(socket.AF_UNIX) as parent, short_path(folder) as short:
        parent.connect(str(short / REQUESTS_SOCKET))
        parent.sendall(json.dumps({"begin": num_engines}).encode())


def fork(folder: Path, take: Callable[[int, int], None], number: int | None = None) -> None:
    """Have one more engine forked.

    Args:
        take: called with the pid and the number under which the engine registers with ipyparallel in a
            moment. From then on the engine belongs to the caller. If an interrupt comes before that, the
            engine is ended.
        number: the engine's; None for the next one of this host.

    Raises:
        OSError, ValueError: the fork server does not answer.
    """
    with _connected(folder) as fork_server:
        fork_server.sendall(json.dumps({"fork": number}).encode())
        answer = json.loads(_received(fork_server))
        with uninterrupted():
            take(answer["pid"], answer["engine"])
            fork_server.sendall(TAKEN)


def prepare_to_train(folder: Path, recipes: Sequence[str]) -> None:
    """Have the fork server import what later engines need to train with these recipes, and return at once.

    Raises:
        OSError: the fork server does not answer.
    """
    # It may still import what it was asked for before, and does not answer meanwhile.
    with _connected(folder) as fork_server:
        fork_server.sendall(json.dumps({"train": list(recipes)}).encode())


@contextmanager
def _connected(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as fork_server:
        fork_server.settimeout(_PATIENCE_S)
        with short_path(folder) as short:
            fork_server.connect(str(short / REQUESTS_SOCKET))
        yield fork_server


def _received(fork_server: socket.socket) -> bytes:
    """The answer of the fork server; TimeoutError if it takes too long."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while not select.select([fork_server], [], [], _POLL_PERIOD_S)[0]:
        take_interrupt()
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"no answer within {_PATIENCE_S:g} s")
    return fork_server.recv(4096)
