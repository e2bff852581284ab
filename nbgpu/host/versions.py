"""The versions that must be the same on all hosts of a cluster."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

_PACKAGES = ("torch", "nbgpu", "ipyparallel")


def here() -> dict[str, str]:
    """The versions on this host."""
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Where another host differs from this one: 'torch 2.9.1 and not 2.13.0'."""
    return [
        f"{name} {there.get(name, 'none')} and not {own}"
        for name, own in here.items()
        if there.get(name) != own
    ]
