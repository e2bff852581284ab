"""This host's network interfaces and their addresses."""

from __future__ import annotations

import socket

import psutil

from nbgpu.errors import ConfigError

LOOPBACK = "127.0.0.1"
_ANYWHERE = "192.0.2.1", 9
"""An address reserved for documentation (RFC 5737), to find the default route. Nothing is sent there."""


def names_by_address() -> dict[str, str]:
    """Return the interface of each IPv4 address of this host. An interface may have several, the first one
    first."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def address_of(interface: str) -> tuple[str, str]:
    """Return the name and the address of an interface.

    Args:
        interface: the name, the address, or 'auto' for the interface of the default route.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    if interface == "auto":
        return towards(*_ANYWHERE)
    present = names_by_address()
    for address, name in present.items():
        if interface in (name, address):
            return name, address
    names = ", ".join(f"{name} ({address})" for address, name in present.items())
    raise ConfigError(f"interface = {interface!r}: there is none with an address. Name one of {names}")


def towards(host: str, port: int) -> tuple[str, str]:
    """Return the name and the address of the interface through which another host is reached; those of the
    loopback interface if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # for UDP, this only selects a route and sends nothing
            local = probe.getsockname()[0]
        except OSError:
            local = LOOPBACK
    return names_by_address().get(local, "lo"), local
