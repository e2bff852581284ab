"""When the person's modules had last been changed as this process imported them.

A module may be edited before anybody asks to watch it.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from typing import Any

from nbgpu.engine.frames import is_library

_changed_s: dict[str, float] = {}


def note() -> None:
    """Keep the times of change of the source files that this process imports, except libraries'.

    An import asks for that time itself, to compare it with that of the compiled file.
    """
    path_stats = SourceFileLoader.path_stats

    def path_stats_noted(self: SourceFileLoader, path: str) -> Any:
        stats = path_stats(self, path)
        if not is_library(path):
            _changed_s[path] = stats["mtime"]
        return stats

    SourceFileLoader.path_stats = path_stats_noted  # type: ignore[method-assign]


def changed_s(path: str) -> float | None:
    """When a source file had been changed last as it was imported, in seconds since the epoch; None where that is not known."""
    return _changed_s.get(path)
