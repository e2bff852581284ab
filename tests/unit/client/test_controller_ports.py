"""A port that the controller holds is its own until it binds it."""

from __future__ import annotations

import socket

import pytest
import zmq

from nbgpu.client.engines.controller import hold_port


def test_a_held_port_can_be_bound_by_zmq_and_by_no_one_who_looks_for_a_free_one() -> None:
    with hold_port() as holder, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        address, port = holder.getsockname()
        for everybody in ("", address):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((everybody, port))
        router.bind(f"tcp://{address}:{port}")
        with context.socket(zmq.ROUTER) as second, pytest.raises(zmq.ZMQError, match="in use"):
            second.bind(f"tcp://{address}:{port}")
        with socket.create_connection((address, port), timeout=10):
            pass


def test_two_holders_never_have_the_same_port() -> None:
    holders = [hold_port() for _ in range(500)]
    ports = {holder.getsockname()[1] for holder in holders}
    for holder in holders:
        holder.close()
    assert len(ports) == 500
