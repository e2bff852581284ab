"""The packages that nbgpu needs, also where it is used from a checkout and not installed."""

from __future__ import annotations

import tomllib
from importlib import metadata

from packaging.requirements import Requirement

from nbgpu.package import PACKAGE


def requirements() -> list[Requirement]:
    """Return the packages that nbgpu needs on this machine, without those of its extras.

    A machine without network may have a checkout on its search path and no installed nbgpu. The list is then
    that of pyproject.toml.
    """
    try:
        lines = metadata.requires("nbgpu") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
    needed = [Requirement(line) for line in lines]
    return [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
