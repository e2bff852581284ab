"""The notebook's imports, run on this rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from nbgpu.engine.ipykernel import shell
from nbgpu.engine.variables import autoreload


def run(statements: Sequence[str], folders: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Run import statements in the person's namespace.

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
    autoreload.note_new()
    return errors, new
