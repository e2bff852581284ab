"""Records the modification times of the person's modules at their import.

`autoreload.py` compares them with the files: a module may be edited before it is watched.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from typing import Any

from nbgpu.engine.frames import is_library

_changed_s: dict[str, float] = {}


def note() -> None:
    """From now on, record the modification time of each source file that is imported, except libraries'.

    The import reads that time anyway, to compare it with that of the compiled file, so the method that reads
    it is wrapped.
    """
    path_stats = SourceFileLoader.path_stats

    def path_stats_noted(self: SourceFileLoader, path: str) -> Any:
        """Return the size and modification time of a source file, and record the time."""
        stats = path_stats(self, path)
        if not is_library(path):
            _changed_s[path] = stats["mtime"]
        return stats

    SourceFileLoader.path_stats = path_stats_noted  # type: ignore[method-assign]


def changed_s(path: str) -> float | None:
    """Return the modification time of a source file at its import, in seconds since the epoch; None if
    unknown."""
    return _changed_s.get(path)
