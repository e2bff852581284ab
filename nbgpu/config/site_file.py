"""The file with which an administrator sets defaults for all users of a host.

This module finds and reads the file. `nbgpu.config.site`, which imports the settings, checks its content, and
passes its check to this module, which the settings themselves import.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbgpu.errors import ConfigError

VARIABLE = "NBGPU_SITE_FILE"
"""The environment variable that names another file than USUAL; empty to use no file."""
USUAL = Path("/etc/nbgpu/defaults.toml")


@dataclass(frozen=True)
class SiteFile:
    """The content of the file."""

    path: Path | None = None
    """The path of the file; None if there is no file."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The default values of settings, by name."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The limits for each person, by name."""


check: Callable[[Path, Mapping[str, Any]], SiteFile] | None = None
"""Checks the tables of a file; set by `nbgpu.config.site`, which knows the settings."""

_is_off: ContextVar[bool] = ContextVar("nbgpu_site_is_off", default=False)
_cached: tuple[tuple[object, ...], SiteFile] | None = None
"""The identity of the file that was read last (path, time, size, inode), and its content."""


@contextmanager
def ignored() -> Iterator[None]:
    """Let settings that are built in the block take no defaults from the file, such as the settings of a
    running cluster, which are already complete."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def read() -> SiteFile:
    """Return the content of this host's file, which is cached until the file changes. It is empty if there is
    no file, or the file is switched off.

    Raises:
        ConfigError: the file cannot be read, or has bad rows; with a line for each.
    """
    global _cached
    named = os.environ.get(VARIABLE)
    if _is_off.get() or named == "":
        return SiteFile()
    path = USUAL if named is None else Path(named).expanduser()
    try:
        status = path.stat()
    except OSError as error:
        if named is None:
            return SiteFile()
        raise ConfigError(f"{VARIABLE}={named}: the file cannot be read ({error.strerror})") from None
    key = (path, status.st_mtime_ns, status.st_size, status.st_ino)
    if _cached is None or _cached[0] != key:
        assert check is not None, "nbgpu.config.site sets it"
        with ignored():  # the check makes settings, which would read this file again
            _cached = key, check(path, _tables(path))
    return _cached[1]


def defaults_of(model: type) -> dict[str, Any]:
    """Return the file's values for a class of settings, by the name of the setting. The class maps its
    settings to rows of the file in `FROM_SITE`."""
    rows: Mapping[str, str] = getattr(model, "FROM_SITE", {})
    if not rows:
        return {}
    defaults = read().defaults
    return {name: defaults[row] for name, row in rows.items() if row in defaults}


def _tables(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is no plain file")
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
