"""The newest versions that nbgpu was tried with, of the libraries whose private names it uses."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.version import Version

TRIED = {"ipykernel": "7.4", "ipython": "9.18", "ipyparallel": "9.2", "torch": "2.13"}
"""By distribution: major and minor version."""


def newer_than_tried() -> Iterator[tuple[str, str, str]]:
    """Each library that is installed in a newer minor version, as name, installed version and tried version."""
    for name, tried in TRIED.items():
        installed = metadata.version(name)
        if Version(installed).release[:2] > Version(tried).release[:2]:
            yield name, installed, tried
