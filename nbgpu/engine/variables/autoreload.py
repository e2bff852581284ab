"""Runs the notebook's imports on this rank, and reloads the person's edited modules with IPython's
autoreload."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.extensions.autoreload import ModuleReloader

from nbgpu.engine.frames import is_library
from nbgpu.engine.ipykernel import shell
from nbgpu.engine.variables import import_times

_reloader: ModuleReloader | None = None
"""IPython's reloader. It stays when `stop` is called: it knows the objects made from each module, and updates
them with the module."""
_is_watching = False
_noted: set[str] = set()
"""The modules that `note_new` has seen: those that are watched, and those of libraries."""


def check() -> dict[str, str]:
    """Reload the person's modules whose files have changed since they were loaded.

    The first call begins to watch the modules, and also finds those that were edited before it.

    Returns:
        For each changed module '', or the error of its new code, after which the old module stays in use.
    """
    global _reloader, _is_watching
    if _reloader is None:
        # From IPython 8 on the reloader takes the shell.
        takes_shell = "shell" in inspect.signature(ModuleReloader).parameters
        _reloader = ModuleReloader(*([shell.current()] if takes_shell else []))
        if hasattr(_reloader, "deduper_reloader"):
            # IPython 9's own way of changing parts of a module leaves its variables as they were.
            _reloader.deduper_reloader.enabled = False
    if not _is_watching:
        _is_watching = True
        shell.current().events.register("post_run_cell", note_new)
        note_new()
    before = dict(_reloader.modules_mtimes)
    # IPython prints the errors of modules and does not return them.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        _reloader.check(check_all=True)
    changed = [
        name for name, time_s in _reloader.modules_mtimes.items() if before.get(name, time_s) != time_s
    ]
    return {name: _failure(name, printed.getvalue()) for name in changed}


def stop() -> None:
    """Stop watching modules."""
    global _is_watching
    if _is_watching:
        _is_watching = False
        shell.current().events.unregister("post_run_cell", note_new)


def note_new(_: Any = None) -> None:
    """Record the modification times of the modules that the last cell has imported, and exclude libraries'
    modules. Without a recorded time autoreload would take a file that is edited before the next cell for an
    unchanged one."""
    if _reloader is None:
        return
    for name in set(sys.modules) - _noted:
        _noted.add(name)
        filename, time_s = _reloader.filename_and_mtime(sys.modules[name])
        if filename is None or is_library(filename):
            _reloader.mark_module_skipped(name)
        else:
            imported_s = import_times.changed_s(filename)
            _reloader.modules_mtimes[name] = time_s if imported_s is None else imported_s


def _failure(module: str, printed: str) -> str:
    """Return the error that IPython has printed for a module, with its line; empty if there is none."""
    _, failed, rest = printed.partition(f"[autoreload of {module} failed: ")
    if not failed:
        return ""
    traceback = rest.partition("\n]")[0].strip()
    places = re.findall(r'File "(.+)", line (\d+)', traceback)
    where = f" ({Path(places[-1][0]).name} line {places[-1][1]})" if places else ""
    return f"{traceback.splitlines()[-1]}{where}"


def run_imports(statements: Sequence[str], folders: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Run the notebook's import statements in the person's namespace.

    Args:
        statements: import statements of one name each.
        folders: the notebook's import path; folders that this rank does not have are appended to its own.

    Returns:
        (the errors by statement, the folders that were appended).
    """
    new = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    sys.path += new
    variables, hidden = shell.current().user_ns, shell.current().user_ns_hidden
    errors = {}
    for statement in statements:
        # Run in separate namespaces, so that no name that nbgpu or IPython has given the ranks is replaced.
        made: dict[str, Any] = {}
        try:
            exec(statement, {"__name__": variables["__name__"]}, made)
        except Exception as error:  # noqa: BLE001 - a module may raise anything
            errors[statement] = f"{type(error).__name__}: {error}"
            continue
        taken = [name for name in made if name in hidden and made[name] is not hidden[name]]
        if taken:
            errors[statement] = f"nbgpu or IPython gives the ranks another {', '.join(taken)}"
        else:
            variables.update(made)
    note_new()
    return errors, new
