"""The packages that nbgpu or some of its settings need, and the newest tested versions of libraries whose
private names nbgpu uses."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.version import Version

from nbgpu.errors import ConfigError
from nbgpu.package import PACKAGE

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from nbgpu.config import TrainConfig

TRIED = {"ipykernel": "7.4", "ipython": "9.18", "ipyparallel": "9.2", "torch": "2.13"}
"""The newest tested version (major.minor) by distribution."""


def requirements() -> list[Requirement]:
    """Return the packages that nbgpu needs on this machine, without those of its extras.

    If nbgpu is not installed, but a checkout is on the search path, the list is that of pyproject.toml.
    """
    # Imported here, because every run imports this module, and only the doctor calls this function.
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("nbgpu") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
    needed = [Requirement(line) for line in lines]
    return [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]


def newer_than_tried() -> Iterator[tuple[str, str, str]]:
    """Yield (name, installed version, tested version) of each library whose installed version is newer than
    the tested one."""
    for name, tried in TRIED.items():
        installed = metadata.version(name)
        if Version(installed).release[:2] > Version(tried).release[:2]:
            yield name, installed, tried


def _is_installed(name: str) -> bool:
    """Return whether a package can be imported. A mere folder of its name, such as one with its logs, is a
    namespace package without an origin, and does not count."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def require_extras(config: TrainConfig) -> None:
    """Raise a ConfigError that names every package that the settings need and that is not installed."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb != "off"}
    lacking = [name for name, is_wanted in wanted.items() if is_wanted and not _is_installed(name)]
    if lacking:
        settings = " and ".join(f"{name}={getattr(config, name)!r}" for name in lacking)
        packages = f"the package{'s' if len(lacking) > 1 else ''} {' and '.join(lacking)}"
        raise ConfigError(
            f"{settings}: {packages} {'are' if len(lacking) > 1 else 'is'} not installed here. "
            f"pip install 'nbgpu[{','.join(lacking)}]', or leave it off"
        )
