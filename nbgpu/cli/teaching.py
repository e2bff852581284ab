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
    """Return the folder of the notebooks: inside the package if nbgpu is installed, beside it in a
    checkout."""
    installed = PACKAGE / "notebooks"
    return installed if installed.is_dir() else PACKAGE.parent / "notebooks"


def notebooks(arguments: list[str]) -> None:
    """Copy the notebooks into a folder, without overwriting files."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError("usage: nbgpu notebooks DIR, such as lessons")
    target = Path(arguments[0]).expanduser()
    paths = sorted(folder().glob("*.ipynb"))
    if existing := [path.name for path in paths if (target / path.name).exists()]:
        raise ConfigError(f"{target} has {', '.join(existing)} already. Name another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in paths:
            shutil.copyfile(path, target / path.name)
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: {error.strerror}. Name another folder") from None
    print(f"{len(paths)} notebooks are in {target}. Begin with {target / FIRST}")


def demo(arguments: list[str]) -> int:
    """Execute the first notebook, and leave it with its outputs, a page and a report in a folder."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise UsageError("usage: nbgpu demo [FOLDER], which is demo where none is named")
    _extend_path()
    # Imported here, because nbconvert takes a second to import.
    from nbgpu.client import demo as executing

    return executing.main([str(folder() / FIRST), *(arguments or ["demo"])])


def lab(arguments: list[str]) -> NoReturn:
    """Open JupyterLab on the first notebook; on a copy if nbgpu is installed and not a checkout."""
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
    _extend_path()
    # JupyterLab refuses to run as root without this flag, and containers often have no other user.
    as_root = ["--allow-root"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "jupyter", "lab", *as_root, *arguments, str(notebook)]
    sys.stdout.flush()
    # JupyterLab replaces this process, so that it gets signals such as SIGTERM.
    os.execv(command[0], command)


def _extend_path() -> None:
    """Put this environment's commands first on the PATH, as if it were activated, so that terminals in
    JupyterLab and cells with `!nbgpu` find the same nbgpu."""
    commands = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([commands, os.environ.get("PATH", os.defpath)])
