"""This host's network interfaces and their addresses."""

from __future__ import annotations

import socket

import psutil

from nbgpu.errors import ConfigError

LOOPBACK = "127.0.0.1"
_ANYWHERE = "192.0.2.1", 9
"""An address reserved for documentation (RFC 5737), to find the default route. Nothing is sent there."""


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    return {
        name: entry.address
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
    present = addresses()
    for name, address in present.items():
        if interface in (name, address):
            return name, address
    names = ", ".join(f"{name} ({address})" for name, address in present.items())
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
    name = next((name for name, address in addresses().items() if address == local), "lo")
    return name, local
