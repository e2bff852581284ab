"""Adds a hint below the NameError of a plain cell if the missing name is defined on the ranks."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.getipython import get_ipython

from nbgpu.client.cluster.cluster import current
from nbgpu.client.variables import missing
from nbgpu.errors import NoClusterError


def install(shell: Any) -> None:
    """Print hints below the cells of this shell. A repeated call does no harm."""
    if _print_hint not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _print_hint)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    if _print_hint in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", _print_hint)


def _print_hint(result: Any) -> None:
    """If the ranks have the name for which a cell raised a NameError, print how to run the cell there."""
    if result is None or not isinstance(result.error_in_exec, NameError):
        return
    shell = get_ipython()
    try:
        ranks = current().ranks
    except NoClusterError:
        return
    assert shell is not None, "a cell has run"
    # The names are read from the cell's Python code, so magics are transformed first.
    code = shell.transform_cell(result.info.raw_cell)
    if hint := missing.hint_for_plain_cell(result.error_in_exec, code, shell.user_ns, ranks):
        print(hint, file=sys.stderr)  # noqa: T201 - the cell's output
