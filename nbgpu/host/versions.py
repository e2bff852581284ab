"""The versions that must be the same on all hosts of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata

PACKAGES = ("nbgpu", "torch", "ipyparallel", "ipykernel", "pyzmq")
"""Packages that make values on one host which the other hosts read."""


def here() -> dict[str, str | None]:
    """The versions on this host, of Python without its patch release; None where a package is missing."""
    found: dict[str, str | None] = {"Python": "{}.{}".format(*sys.version_info)}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def differences(there: Mapping[str, str | None], here: Mapping[str, str | None]) -> list[str]:
    """Name what differs on another host: ['torch 2.9.1 and not 2.13.0', 'no nbgpu']."""
    return [
        f"{name} {other} and not {own}" if (other := there.get(name)) else f"no {name}"
        for name, own in here.items()
        if there.get(name) != own
    ]
