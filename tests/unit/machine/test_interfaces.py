"""Interfaces that have several addresses."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from nbgpu.machine import interfaces


@pytest.fixture(autouse=True)
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        SimpleNamespace(family=socket.AF_INET, address=address) for address in ("127.0.0.1", "10.0.0.5")
    ]
    other_kind = SimpleNamespace(family=socket.AF_INET6, address="::1")
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: {"eth7": [*entries, other_kind]})


def test_each_address_names_its_interface() -> None:
    for address in ("127.0.0.1", "10.0.0.5"):
        assert interfaces.address_of(address) == ("eth7", address)
    assert interfaces.address_of("eth7") == ("eth7", "127.0.0.1")


def test_the_address_of_the_route_is_found() -> None:
    assert interfaces.towards("127.0.0.1", 9) == ("eth7", "127.0.0.1")
