"""The newest tested versions of the libraries whose private names nbgpu uses."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.version import Version

TRIED = {"ipykernel": "7.4", "ipython": "9.18", "ipyparallel": "9.2", "torch": "2.13"}
"""The major and minor version by distribution."""


def newer_than_tried() -> Iterator[tuple[str, str, str]]:
    """Each library whose installed version is newer, as its name, the installed version and the tested
    version."""
    for name, tried in TRIED.items():
        installed = metadata.version(name)
        if Version(installed).release[:2] > Version(tried).release[:2]:
            yield name, installed, tried
