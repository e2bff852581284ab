"""Modules of the person's that were edited, loaded anew on this rank; by IPython's autoreload."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

from IPython.extensions.autoreload import ModuleReloader

from nbgpu.engine.frames import is_library
from nbgpu.engine.ipykernel import shell
from nbgpu.engine.variables import import_times

_reloader: ModuleReloader | None = None
"""Kept while nothing is watched: the reloader knows what was made of a module before, and renews that with the module."""
_is_watching = False
_known: set[str] = set()
"""Modules that are watched, or that are a library's."""


def check() -> dict[str, str]:
    """Loads those modules anew whose files have changed since they were loaded.

    The first call begins to watch them, and finds what was edited before it, too.

    Returns:
        By module that had changed: '', or what went wrong; the old one stays in use then.
    """
    global _reloader, _is_watching
    if _reloader is None:
        _reloader = ModuleReloader(shell.current())
        if hasattr(_reloader, "deduper_reloader"):
            # IPython 9's own way of changing parts of a module leaves its variables as they were.
            _reloader.deduper_reloader.enabled = False
    if not _is_watching:
        _is_watching = True
        shell.current().events.register("post_run_cell", note_new)
        note_new()
    before = dict(_reloader.modules_mtimes)
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        _reloader.check(check_all=True)
    changed = [
        name for name, time_s in _reloader.modules_mtimes.items() if before.get(name, time_s) != time_s
    ]
    return {name: _failure(name, told.getvalue()) for name in changed}


def stop() -> None:
    """Watches no more."""
    global _is_watching
    if _is_watching:
        _is_watching = False
        shell.current().events.unregister("post_run_cell", note_new)


def note_new(_: Any = None) -> None:
    """Notes when the modules that a cell has imported were last changed: they may change again before the next cell."""
    if _reloader is None:
        return
    for name in set(sys.modules) - _known:
        _known.add(name)
        filename, time_s = _reloader.filename_and_mtime(sys.modules[name])
        if filename is None or is_library(filename):
            _reloader.mark_module_skipped(name)
        else:
            known_s = import_times.changed_s(filename)
            _reloader.modules_mtimes[name] = time_s if known_s is None else known_s


def _failure(module: str, told: str) -> str:
    """The error that IPython has printed for a module, with its place; empty where there is none."""
    _, found, rest = told.partition(f"[autoreload of {module} failed: ")
    if not found:
        return ""
    traceback = rest.partition("\n]")[0].strip()
    places = re.findall(r'File "(.+)", line (\d+)', traceback)
    where = f" ({Path(places[-1][0]).name} line {places[-1][1]})" if places else ""
    return f"{traceback.splitlines()[-1]}{where}"
