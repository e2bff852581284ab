"""The notebooks that come with nbgpu: `nbgpu demo`, `notebooks` and `lab`."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from nbgpu.cli.catalogue import UsageError
from nbgpu.errors import ConfigError
from nbgpu.package import PACKAGE

FIRST = "00_first_run.ipynb"


def folder() -> Path:
    """Return the folder of the notebooks, which is inside an installed package and beside it in a
    checkout."""
    inside = PACKAGE / "notebooks"
    return inside if inside.is_dir() else PACKAGE.parent / "notebooks"


def notebooks(arguments: list[str]) -> None:
    """Copy the notebooks; a file of the same name is never overwritten."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError("usage: nbgpu notebooks DIR, such as lessons")
    to = Path(arguments[0]).expanduser()
    paths = sorted(folder().glob("*.ipynb"))
    if there := [path.name for path in paths if (to / path.name).exists()]:
        raise ConfigError(f"{to} has {', '.join(there)} already. Name another folder")
    try:
        to.mkdir(parents=True, exist_ok=True)
        for path in paths:
            shutil.copyfile(path, to / path.name)
    except OSError as error:
        raise ConfigError(f"{error.filename or to}: {error.strerror}. Name another folder") from None
    print(f"{len(paths)} notebooks are in {to}. Begin with {to / FIRST}")


def demo(arguments: list[str]) -> int:
    """Execute the first notebook."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise UsageError("usage: nbgpu demo [FOLDER], which is demo where none is named")
    _show_commands()
    # nbconvert takes a second to import.
    from nbgpu.client import demo as executing

    return executing.main([str(folder() / FIRST), *(arguments or ["demo"])])


def lab(arguments: list[str]) -> NoReturn:
    """Open JupyterLab on the first notebook, in a copy where nbgpu is installed without a checkout."""
    if find_spec("jupyterlab") is None:
        raise ConfigError(
            "JupyterLab is not installed here: pip install 'nbgpu[lab]'. Any other front end for notebooks will do, too"
        )
    notebook = folder() / FIRST
    if notebook.is_relative_to(PACKAGE):
        copied = Path("notebooks") / FIRST
        if not copied.exists():
            notebooks([str(copied.parent)])
        notebook = copied
    _show_commands()
    # JupyterLab asks root to say so. In a container there is often nobody else.
    as_root = ["--allow-root"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "jupyter", "lab", *as_root, *arguments, str(notebook)]
    sys.stdout.flush()
    # It takes the place of this process, so that what is meant for JupyterLab, such as SIGTERM, reaches it.
    os.execv(command[0], command)


def _show_commands() -> None:
    """Put this environment's commands first on the path, as if it were activated: terminals in JupyterLab and
    cells with `!nbgpu` find the same nbgpu."""
    here = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
