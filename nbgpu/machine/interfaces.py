"""This host's network interfaces and their addresses."""

from __future__ import annotations

import socket

import psutil

from nbgpu.errors import ConfigError

LOOPBACK = "127.0.0.1"
_ANYWHERE = "192.0.2.1", 9
"""An address that is reserved for documentation: nothing is sent there."""


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def address_of(interface: str) -> tuple[str, str]:
    """Return the name and the address of an interface.

    Args:
        interface: its name, its address, or 'auto' for the one by which other hosts are reached.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    known = addresses()
    if interface == "auto":
        return towards(*_ANYWHERE)
    for name, address in known.items():
        if interface in (name, address):
            return name, address
    there = ", ".join(f"{name} ({address})" for name, address in known.items())
    raise ConfigError(f"interface = {interface!r}: there is none with an address. Name one of {there}")


def towards(host: str, port: int) -> tuple[str, str]:
    """Return the name and the address of the interface through which another host is reached; those of the
    loopback if no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
            own = probe.getsockname()[0]
        except OSError:
            own = LOOPBACK
    name = next((name for name, address in addresses().items() if address == own), "lo")
    return name, own
