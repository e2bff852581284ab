"""The module search path of the Python processes that nbgpu starts.

A file beside the notebook may have the name of a module of the standard library, such as `random.py` or
`secrets.py`. That does no harm in a notebook's kernel, because IPython puts the notebook's folder behind the
standard library. The processes that nbgpu starts do the same, because torch and ipyparallel import parts of
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
"""The program that runs a module as `python -m` would, with the nbgpu that runs here on the search path. That
may be a checkout in the working folder which is not installed, or which differs from the installed one."""


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of nbgpu in a process of its own, without the working folder on the
    search path.

    The environment variable PYTHONSAFEPATH would do the same, but also to programs that the user's code
    starts there.
    """
    run_module = _RUN_MODULE.format(folder=str(PACKAGE.parent))
    return [sys.executable, "-P", *_warning_options(), "-c", run_module, module, *arguments]


def _warning_options() -> list[str]:
    """Return options of Python that apply warnings-as-errors of the environment to the user's cells only.
    Libraries warn of one another all the time, and a process would fail because of that before it has
    started."""
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
    place = 1 + max((i for i, entry in enumerate(sys.path) if entry in _standard_library()), default=-1)
    sys.path[place:place] = folders


def _standard_library() -> set[str]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return {str(folder) for folder in [*folders, *(folder / "lib-dynload" for folder in folders)]}


def note_namesakes(error: BaseException) -> None:
    """Add a note to an ImportError, or to an AttributeError of a module, where several files have the
    module's name, which the error itself does not say. May be called again for the same error."""
    sentence = _about_namesakes(error)
    if sentence and sentence not in getattr(error, "__notes__", ()):
        error.add_note(sentence)


def _about_namesakes(error: BaseException) -> str:
    """Return a sentence that names the modules with the name of the one in the error; '' if it is unique."""
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
    taken, *hidden = dict.fromkeys([*_imported_from(name), *_found_along_the_path(name)]) or [""]
    if not hidden:
        return ""
    return f"Several modules are called {name!r}. This one is {taken}, and hides {', '.join(hidden)}"


def _imported_from(name: str) -> list[str]:
    """The file that a module was imported from, in a list that is empty if the module was not imported."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return [_place(spec.origin)] if spec is not None and spec.origin else []


def _found_along_the_path(name: str) -> list[str]:
    """Every file that would be imported under a name if those before it were not there."""
    specs = [PathFinder.find_spec(name, [entry]) for entry in sys.path]
    return [_place(spec.origin) for spec in specs if spec is not None and spec.origin]


def _place(origin: str) -> str:
    # The entry '' of the path gives relative names.
    return f"{origin} in Python itself" if origin in ("built-in", "frozen") else str(Path(origin).absolute())
