"""The versions that must be the same on all hosts of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata

PACKAGES = ("nbgpu", "torch", "ipyparallel", "ipykernel", "pyzmq")
"""Packages whose messages or objects are exchanged between hosts."""


def here() -> dict[str, str | None]:
    """Return the versions on this host, by package; that of Python without its patch release. None for a
    package that is not installed."""
    versions: dict[str, str | None] = {"Python": "{}.{}".format(*sys.version_info)}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def differences(there: Mapping[str, str | None], here: Mapping[str, str | None]) -> list[str]:
    """Return the differences of another host's versions: ['torch 2.9.1 and not 2.13.0', 'no nbgpu'].

    Args:
        there: the versions on the other host.
        here: the versions on this host.
    """
    return [
        f"{name} {other} and not {version}" if (other := there.get(name)) else f"no {name}"
        for name, version in here.items()
        if there.get(name) != version
    ]
