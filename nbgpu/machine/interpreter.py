"""The module search path of the Python processes that nbgpu starts.

A file beside the notebook may have the name of a module of the standard library, such as `random.py`. In a
notebook's kernel that does no harm, because IPython puts the notebook's folder behind the standard library on
the search path. The processes that nbgpu starts do the same, because torch and ipyparallel import modules of
the standard library at any time.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from nbgpu.package import PACKAGE

_USUALLY_IGNORED = ("DeprecationWarning", "PendingDeprecationWarning", "ImportWarning", "ResourceWarning")
"""The warnings that Python ignores by default, except in the main module."""

_RUN_MODULE = (
    "import runpy, sys; "
    "place = next((i for i, entry in enumerate(sys.path) if entry.endswith('-packages')), len(sys.path)); "
    "sys.path.insert(place, {folder!r}); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""A program that runs a module like `python -m`, with the folder of the present nbgpu on the search path, in
front of the installed packages. The present nbgpu may be a checkout that is not installed, or that differs
from the installed version."""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of nbgpu in a new process, without the working folder on the
    search path.

    The option -P is used because the environment variable PYTHONSAFEPATH would also affect programs that the
    user's code starts in that process.
    """
    run_module = _RUN_MODULE.format(folder=str(PACKAGE.parent))
    return [sys.executable, "-P", *_warning_options(), "-c", run_module, module, *arguments]


def _warning_options() -> list[str]:
    """Return options of Python that restrict warnings-as-errors of PYTHONWARNINGS to the user's cells. With
    errors also in libraries, whose imports often warn, the process could not start."""
    options = []
    for option in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        action, message, category, module, *_ = (*option.strip().split(":"), "", "", "", "")
        if action and "error".startswith(action) and not module:
            usual = [f"ignore::{kind}" for kind in _USUALLY_IGNORED]
            options += [f"default:{message}:{category}", *usual, f"error:{message}:{category}:__main__"]
        else:
            options.append(option)
    return [part for option in options for part in ("-W", option)]


def look_in(folders: Iterable[str]) -> None:
    """Put folders on this process's search path, behind the standard library and before installed
    packages."""
    index = 1 + max((i for i, entry in enumerate(sys.path) if entry in _standard_library()), default=-1)
    sys.path[index:index] = folders


def _standard_library() -> set[str]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return {str(folder) for folder in [*folders, *(folder / "lib-dynload" for folder in folders)]}


def note_namesakes(error: BaseException) -> None:
    """Add a note to an ImportError, or to an AttributeError of a module, if several files on the search path
    have the module's name. May be called again for the same error."""
    sentence = _namesakes_sentence(error)
    if sentence and sentence not in getattr(error, "__notes__", ()):
        error.add_note(sentence)


def _namesakes_sentence(error: BaseException) -> str:
    """Return a sentence that lists all files with the name of the module in the error; empty if the module is
    the only one of its name."""
    if isinstance(error, ImportError):
        name = error.name
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
    else:
        return ""
    # Code in cells belongs to the module '__main__', which is not imported.
    name = (name or "").partition(".")[0]
    if not name or name == "__main__":
        return ""
    # The module that was imported, and then every file that could be imported under this name.
    specs = [getattr(sys.modules.get(name), "__spec__", None)]
    specs += [PathFinder.find_spec(name, [entry]) for entry in sys.path]
    origins = [_format_origin(spec.origin) for spec in specs if spec is not None and spec.origin]
    imported, *hidden = dict.fromkeys(origins) or [""]
    if not hidden:
        return ""
    return f"Several modules are called {name!r}. This one is {imported}, and hides {', '.join(hidden)}"


def _format_origin(origin: str) -> str:
    """Return a module's origin as an absolute path; the entry '' of the search path gives relative ones."""
    return f"{origin} in Python itself" if origin in ("built-in", "frozen") else str(Path(origin).absolute())
