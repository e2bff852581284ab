"""A connection to another host that does not end at a rank is refused before anything is sent over it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch.distributed as dist

from nbgpu.engine.group import sockets

HERE, THERE = "127.0.0.1", "127.0.0.2"
"""Two addresses, as of two hosts."""
PATIENCE = timedelta(seconds=60)


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    """The other end of a connection of this process's newest group, which is at another address."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HERE, 0)))
        other = stack.enter_context(socket.socket())
        other.bind((THERE, 0))
        other.connect(listener.getsockname())
        stack.callback(sockets.cut)
        with sockets.noted_as_groups():
            own, _ = listener.accept()
        stack.enter_context(own)
        yield other


def say(store: dist.HashStore, rank: int, *ends: tuple[object, object]) -> None:
    """Say what a rank says of its connections."""
    store.set(f"nbgpu/ends/g/{rank}", json.dumps(ends))


def test_what_a_rank_says_is_its_own_is_no_stranger(connected: socket.socket) -> None:
    store = dist.HashStore()
    say(store, 1, (connected.getsockname(), connected.getpeername()))
    sockets.refuse_strangers(store, "g", 0, [0, 1], PATIENCE)
    assert json.loads(store.get("nbgpu/ends/g/0")) == [
        [list(connected.getpeername()), list(connected.getsockname())]
    ]


@pytest.mark.parametrize("said", ["of no connection", "of one with another port"])
def test_what_no_rank_says_is_its_own_is_refused_with_its_address(
    connected: socket.socket, said: str
) -> None:
    address, port = connected.getsockname()
    store = dist.HashStore()
    say(store, 1, *([] if said == "of no connection" else [((address, port + 1), connected.getpeername())]))
    with pytest.raises(
        ConnectionError, match=rf"what is at {THERE}:{port} is in a rank's place.*none of the cluster's ranks"
    ):
        sockets.refuse_strangers(store, "g", 0, [0, 1], PATIENCE)


def test_a_rank_that_says_nothing_is_not_waited_for_without_end(connected: socket.socket) -> None:
    with pytest.raises(ConnectionError, match="has not said which connections are its own"):
        sockets.refuse_strangers(dist.HashStore(), "g", 0, [0, 1], timedelta(seconds=0.1))


def test_ranks_of_one_host_say_nothing() -> None:
    store = dist.HashStore()
    with sockets.noted_as_groups():
        pass
    sockets.refuse_strangers(store, "g", 0, [0, 1], PATIENCE)
    assert store.num_keys() == 0
