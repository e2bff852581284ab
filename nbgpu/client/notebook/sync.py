"""`%nbgpu sync`: repeat the notebook's imports on the ranks.

The import statements are read from the text of the cells that ran.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nbgpu.client.cluster.cluster import Cluster
from nbgpu.client.engines.calls import reference
from nbgpu.protocol.calls import Call
from nbgpu.serialization.sources import parse_cell
from nbgpu.text.ranks import named_ranges, ranks_by


def sync(cluster: Cluster, shell: Any) -> str:
    """Run the notebook's imports on all ranks, and report what was sent and what failed on which ranks.

    Raises:
        RunError: a training run has the ranks now.
    """
    statements = list(
        dict.fromkeys(import_statements(shell.history_manager.input_hist_parsed, shell.user_ns))
    )
    if not statements:
        return "the notebook has no imports to repeat"
    # The ranks add those folders to their `sys.path` that they do not have.
    folders = [os.path.abspath(folder) for folder in sys.path if folder]  # noqa: PTH100 - as text
    by_rank: Mapping[int, tuple[dict[str, str], list[str]]] = cluster.apply(
        reference(Call.RUN_IMPORTS), statements, folders
    )
    failed = ranks_by((error, rank) for rank, (errors, _) in by_rank.items() for error in errors.items())
    added = dict.fromkeys(folder for _, new_folders in by_rank.values() for folder in new_folders)
    # Imports that failed on every rank are left out of the history, from which a replaced rank repeats cells.
    failed_everywhere = {statement for (statement, _), ranks in failed.items() if len(ranks) == len(by_rank)}
    imported = [statement for statement in statements if statement not in failed_everywhere]
    if imported:
        cluster.parts.state.history.note(by_rank, "\n".join(imported))
    lines = [f"on the ranks now: {'; '.join(imported)}"] if imported else []
    if added:
        lines.append(f"the ranks also look for modules in {', '.join(added)}")
    lines += [
        f"not on {named_ranges(ranks)}: {statement} ({error})" for (statement, error), ranks in failed.items()
    ]
    return "\n".join(lines)


def import_statements(cells: list[str], variables: Mapping[str, Any]) -> Iterator[str]:
    """Yield the imports in cells, each as a statement for one name, if the notebook still has the name."""
    for cell in cells:
        for statement in _imports_in(parse_cell(cell)) if "import" in cell else ():
            for alias in statement.names:
                if isinstance(statement, ast.ImportFrom):
                    text = f"from {statement.module} import {ast.unparse(alias)}"
                    name = alias.asname or alias.name
                else:
                    text = f"import {ast.unparse(alias)}"
                    name = alias.asname or alias.name.partition(".")[0]
                if name in variables or name == "*":
                    yield text


def _imports_in(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the absolute imports below a node, also under `if`, `try` and `with`, but not in functions and
    classes, whose imports define no name of the notebook."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield child
        elif isinstance(child, ast.ImportFrom):
            if child.module not in (None, "__future__") and not child.level:
                yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _imports_in(child)
