"""Runs one of the project's notebooks on two CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from conftest import REPOSITORY
from jupyter_core.utils import ensure_event_loop
from nbclient import NotebookClient

# nbclient makes one event loop for the life of the process; made here, it is no single test's leftover.
ensure_event_loop()


def executed(name: str, folder: Path, changes: Mapping[str, str] | None = None) -> Any:
    """The notebook with its outputs.

    Args:
        name: its file in notebooks/.
        folder: where its kernel runs.
        changes: what stands in its cells, and what is put in the place of it.
    """
    content = nbformat.read(REPOSITORY / "notebooks" / name, as_version=4)
    for cell in content.cells:
        if cell.cell_type == "code":
            for old, new in {"%nbgpu start": "%nbgpu start --gpus none --ranks 2", **(changes or {})}.items():
                cell.source = cell.source.replace(old, new)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=240, kernel_name="python3", resources=resources).execute()
    return content
