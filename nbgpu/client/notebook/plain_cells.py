"""Adds a hint below the NameError of a plain cell if the ranks have the name that the cell lacks.

A cell that does not fail costs one comparison.
"""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.getipython import get_ipython

from nbgpu.client.cluster.cluster import current
from nbgpu.client.variables import missing
from nbgpu.errors import NoClusterError


def install(shell: Any) -> None:
    """Look at the error of every cell of this shell that fails. Harmless when repeated."""
    if _look not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _look)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    if _look in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", _look)


def _look(result: Any) -> None:
    if result is not None and isinstance(result.error_in_exec, NameError):
        _report(result.error_in_exec, result.info.raw_cell)


def _report(error: NameError, cell: str) -> None:
    """Print below a NameError that the ranks have the name, if they do, and how to run the cell there."""
    shell = get_ipython()
    try:
        ranks = current().ranks
    except NoClusterError:
        return
    assert shell is not None, "a cell has run"
    # The hint looks for names in the cell's Python code, so magics are transformed first.
    text = shell.transform_cell(cell)
    if hint := missing.hint_for_plain_cell(error, text, shell.user_ns, ranks):
        print(hint, file=sys.stderr)  # noqa: T201 - the cell's output
