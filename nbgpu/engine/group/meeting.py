"""The rendezvous store of the ranks: its client, in a rank.

torch's own stores are not safe or need a shared folder: a TCPStore listens on every interface of the host and
lets everybody in, and a FileStore needs a folder that all ranks share. This store sends its requests to the
server in the controller's process (`client/engines/meeting.py`) over CurveZMQ, encrypted and authenticated
both ways.

torch calls the store from threads of its own too, such as NCCL's watchdog. Each request therefore has a
connection to itself, which is used again afterwards, and the GIL is free while a request waits.

Ranks that torchrun started meet in torchrun's own store, under keys with a prefix for this start alone.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
import zmq
from torch.distributed.rendezvous import rendezvous

from nbgpu.protocol.meeting import LEASE_S, MAX_VALUE_BYTES, Ask, MeetingPlace, Said
from nbgpu.text.ranks import named_ranks

if TYPE_CHECKING:
    _Socket = zmq.Socket[bytes]

_log = logging.getLogger("nbgpu.engine")

_GIVEN_UP = "the process group was given up, because another rank failed"
_LOOK_PERIOD_MS = 500
"""How often a rank that waits for an answer checks whether its generation was given up. A server that can be
reached answers at once then."""
_ANSWER_PATIENCE_S = 600.0
"""How long a rank waits for an answer after the longest time that the request itself may take. A silent
controller may have been stopped together with the host; once it has ended, the rank's sentinel ends the
rank."""
_GIVE_UP_PATIENCE_MS = 1000
_POLL_S = 0.01
"""How often rank 0 looks for the other ranks in torchrun's store."""

_context: tuple[int, zmq.Context[_Socket]] | None = None
"""This process's context, with the process id: a forked child makes its own."""
_kept: list[Store] = []
"""References to all stores: torch keeps only the C++ part of a store, whose methods need the part in
Python."""


class Store(dist.Store):  # type: ignore[name-defined,misc]
    """The store of one generation of the group, over a server in the controller's process.

    It overrides the methods of torch's Store, which C++ and Python code of torch call.

    Args:
        place: the server's address and the keys of its encryption.
        generation: the number of this forming of the group, which is part of each request, so that
            generations share no keys.
    """

    def __init__(self, place: MeetingPlace, generation: int) -> None:
        super().__init__()
        self._place = place
        self._generation = str(generation).encode()
        self._idle: deque[tuple[int, _Socket]] = deque()
        """Connections that are not in use, with the process that made them. A deque needs no lock, which a
        forked child might inherit locked."""
        self._is_given_up = False
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask(Ask.SET, _encoded(key), _encoded(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        if len(keys) != len(values):
            raise ValueError(f"there are {len(keys)} keys and {len(values)} values")
        if keys:
            pairs = [part for pair in zip(keys, values, strict=True) for part in pair]
            self._ask(Ask.SET, *map(_encoded, pairs))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self._ask_until(Ask.GET, [key], self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all keys and return their values."""
        return self._ask_until(Ask.GET, keys, self.timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, which is 0 at first, and return the sum."""
        return int(self._ask(Ask.ADD, _encoded(key), str(amount).encode())[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to the value under a key, which is empty at first."""
        self._ask(Ask.APPEND, _encoded(key), _encoded(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store a value if the present one is the expected one; return the value afterwards."""
        return self._ask(Ask.COMPARE_SET, *map(_encoded, (key, expected, desired)))[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return not keys or self._ask(Ask.CHECK, *map(_encoded, keys))[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask_until(Ask.WAIT, keys, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return self._ask(Ask.DELETE, _encoded(key))[0] == b"1"

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask(Ask.COUNT)[0])

    def list_keys(self) -> list[str]:
        """Return the keys."""
        return [key.decode() for key in self._ask(Ask.LIST)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._ask(Ask.PUSH, _encoded(key), _encoded(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue and return it; wait for one with `block`.

        Raises:
            QueueEmptyError: the queue is empty, without `block`.
        """
        if not block:
            values = self._ask_once(Ask.POP, b"0", _encoded(key))
            if values is None:
                raise dist.QueueEmptyError(f"the queue {key!r} is empty")
            return values[0]
        return self._ask_until(Ask.POP, [key], self.timeout)[0]

    def queue_len(self, key: str) -> int:
        """Return the length of a queue."""
        return int(self._ask(Ask.LENGTH, _encoded(key))[0])

    def has_extended_api(self) -> bool:
        """Return whether the store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> Store:
        """Return this store, which several threads may use at the same time."""
        return self

    # The names under which C++ calls them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def follow(self, newer: Store) -> None:
        """Take the keys of a newer generation from now on, for a group that is formed again in place and
        keeps its store."""
        self._generation, self._place = newer._generation, newer._place
        self._is_given_up = False

    def give_up(self) -> None:
        """End this generation for all ranks: a rank that waits in it gets DistStoreError at once. Call on any
        thread.

        The call waits at most `_GIVE_UP_PATIENCE_MS` for the answer. A server that is stopped gets the
        message once it continues.
        """
        if self._is_given_up:
            return
        self._is_given_up = True
        socket = self._idle_connection()
        # ZeroMQ would otherwise drop a message that is not sent when the socket is closed.
        socket.linger = -1
        socket.send_multipart([Ask.GIVE_UP.value, self._generation])
        if not socket.poll(_GIVE_UP_PATIENCE_MS):
            _log.warning(
                "the controller does not answer that generation %s is given up", self._generation.decode()
            )
        socket.close()
        self._close_idle()

    def _ask_until(self, kind: Ask, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """Repeat a request until all keys exist; DistStoreError after the timeout.

        The server answers 'later' after at most `LEASE_S`, so that it forgets requests of ranks that have
        ended.
        """
        names = list(map(_encoded, keys))
        # torch reads a timeout of zero as none.
        timeout_s = timeout.total_seconds() or float("inf")
        give_up_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, give_up_s - time.monotonic())
            patience_ms = str(int(1000 * min(left_s, LEASE_S)) + 1).encode()
            values = self._ask_once(kind, patience_ms, *names)
            if values is not None:
                return values
            if time.monotonic() >= give_up_s:
                raise dist.DistStoreError(f"waited {timeout_s:g} s for the keys {', '.join(keys)}")

    def _ask(self, kind: Ask, *arguments: bytes) -> list[bytes]:
        values = self._ask_once(kind, *arguments)
        assert values is not None, "only requests that wait are answered later"
        return values

    def _ask_once(self, kind: Ask, *arguments: bytes) -> list[bytes] | None:
        """Send one request and return the values of the answer; None if the server answers that the keys, or
        a value in the queue, do not exist yet.

        Raises:
            DistStoreError: the generation was given up, or the server does not answer.
            ValueError: the server refuses the request.
        """
        if (size := max(map(len, arguments), default=0)) > MAX_VALUE_BYTES:
            # The server would close the connection.
            raise ValueError(
                f"a value of {size} bytes is too large for the store in which the ranks meet, which takes "
                f"{MAX_VALUE_BYTES}: send it with a collective"
            )
        if self._is_given_up:
            # NCCL's threads ask again and again, until their group has ended.
            raise dist.DistStoreError(_GIVEN_UP)
        socket, generation = self._idle_connection(), self._generation
        try:
            socket.send_multipart([kind.value, generation, *arguments])
            give_up_s = time.monotonic() + LEASE_S + _ANSWER_PATIENCE_S
            # Polled in short intervals, because `give_up` on another thread has no connection of this thread
            # to close.
            while not socket.poll(_LOOK_PERIOD_MS):
                if self._is_given_up:
                    raise dist.DistStoreError(_GIVEN_UP)
                if time.monotonic() > give_up_s:
                    raise dist.DistStoreError(
                        "the cluster's controller, in which the ranks meet, does not answer: %nbgpu restart"
                    )
            verdict, *values = socket.recv_multipart()
        except BaseException:
            socket.close()  # an answer may be on its way
            raise
        if verdict == Said.GIVEN_UP.value:
            socket.close()
            # The store may have been made to follow the next generation meanwhile, on another thread.
            if generation == self._generation:
                self._is_given_up = True
                self._close_idle()
            raise dist.DistStoreError(_GIVEN_UP)
        # Only now: a REQ socket takes the next request once it has received the answer to this one.
        self._idle.append((os.getpid(), socket))
        if verdict == Said.REFUSED.value:
            raise ValueError(values[0].decode())
        return None if verdict == Said.LATER.value else values

    def _idle_connection(self) -> _Socket:
        """Return a connection that no other thread uses: an idle one of this process, or a new one."""
        if (idle := self._take_idle()) is not None:
            return idle
        socket = _own_context().socket(zmq.REQ)
        # The process must be able to end without this server.
        socket.linger = 0
        socket.tcp_keepalive = 1
        socket.curve_serverkey = self._place.server_public_key.encode()
        socket.curve_publickey = self._place.public_key.encode()
        socket.curve_secretkey = self._place.secret_key.encode()
        socket.connect(self._place.address)
        return socket

    def _close_idle(self) -> None:
        """Close the connections that are not in use."""
        while (socket := self._take_idle()) is not None:
            socket.close()

    def _take_idle(self) -> _Socket | None:
        """Return a connection of this process that is not in use, which is then the caller's; None if there
        is none."""
        with suppress(IndexError):  # another thread may be faster
            while self._idle:
                pid, socket = self._idle.pop()
                if pid == os.getpid():
                    return socket
        return None


def open_store(address: str, keys_file: Path, generation: int) -> Store:
    """Return the store of a generation.

    Args:
        address: the server's, as this host reaches it.
        keys_file: the file with the keys, which holds a `MeetingPlace`.
        generation: the number of this forming of the group.
    """
    return Store(replace(MeetingPlace.read(keys_file), address=address), generation)


def _own_context() -> zmq.Context[_Socket]:
    """Return this process's ZeroMQ context: sockets of a context must not be used after a fork."""
    global _context
    if _context is None or _context[0] != os.getpid():
        # Not the one that ipykernel uses, which cannot end before all its sockets are closed.
        _context = os.getpid(), zmq.Context()
    return _context[1]


def _encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def torchrun_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """Return the store that torchrun's environment names, without the keys of earlier ranks.

    torchrun keeps one store for all its restarts (pytorch/pytorch issues 135712 and 167288). The store still
    has the addresses of ranks that have ended. A rank that reads such an address before the successor has
    written the new one connects to nobody, or waits for ever. The number of the restart, which torchrun gives
    in TORCHELASTIC_RESTART_COUNT, does not tell the starts apart: each host counts its own.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    return part_of_this_start(store, rank, world_size, timeout)


def part_of_this_start(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> dist.Store:  # type: ignore[name-defined]
    """Return a part of a store, as a PrefixStore, that only the ranks of this start share.

    Each process writes a random name into the store, and rank 0 answers under this name with the prefix. Rank
    0 may read the name of an earlier process of the rank, which has ended: it answers that name, too, and
    reads again until the rank's present process confirms that it has the prefix.

    Args:
        store: a store that all starts share. No process of an earlier start still uses it.
        rank: the rank of this process.
        world_size: the number of ranks.
        timeout: how long the ranks wait for one another.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    own_name = secrets.token_hex(16)
    if rank == 0:
        _answer(store, own_name, set(range(1, world_size)), timeout)
        return dist.PrefixStore(own_name, store)  # type: ignore[attr-defined]
    store.set(_name_key(rank), own_name)
    try:
        store.wait([_answer_key(own_name)], timeout)
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {rank} found no rank 0 in torchrun's store within {timeout.total_seconds():g} s"
        ) from error
    prefix = store.get(_answer_key(own_name)).decode()
    store.set(_confirmation_key(rank, prefix), "")
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _answer(
    store: dist.Store,  # type: ignore[name-defined]
    prefix: str,
    absent: set[int],
    timeout: timedelta,
) -> None:
    """Send each absent rank the prefix of this start, until all have confirmed it. Runs on rank 0."""
    give_up_s = time.monotonic() + timeout.total_seconds()
    while absent:
        for rank in sorted(absent):
            if store.check([_name_key(rank)]):
                store.set(_answer_key(store.get(_name_key(rank)).decode()), prefix)
        absent -= {rank for rank in absent if store.check([_confirmation_key(rank, prefix)])}
        if absent and time.monotonic() > give_up_s:
            raise RuntimeError(
                f"{named_ranks(sorted(absent))} did not come to torchrun's store within "
                f"{timeout.total_seconds():g} s"
            )
        time.sleep(_POLL_S)


def _name_key(rank: int) -> str:
    return f"nbgpu/name/{rank}"


def _answer_key(name: str) -> str:
    return f"nbgpu/answer/{name}"


def _confirmation_key(rank: int, prefix: str) -> str:
    return f"nbgpu/heard/{prefix}/{rank}"
