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

# Called after each cell, before matplotlib's own callback draws the cell's figures and closes them.
_WATCH_AXES = """
def _without_names():
    import sys

    pyplot = sys.modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot else ():
        figure = pyplot.figure(number)
        for axes in figure.axes:
            x = axes.get_xlabel() or figure.get_supxlabel()
            y = axes.get_ylabel() or figure.get_supylabel()
            is_bar = hasattr(axes, "_colorbar")
            if not (axes.get_ylabel() or axes.get_xlabel() if is_bar else x and y):
                _unnamed.append(axes.get_title() or "a figure with no title")

_unnamed = []
get_ipython().events.register("post_execute", _without_names)
"""
_LOOK_AT_AXES = """
assert not _unnamed, f"axes with no name in: {_unnamed}"
"""


def executed(name: str, folder: Path, changes: Mapping[str, str] | None = None) -> Any:
    """The notebook with its outputs.

    Every axis of every figure that matplotlib draws must have a name.

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
    cells = content.cells
    content.cells = [nbformat.v4.new_code_cell(_WATCH_AXES), *cells, nbformat.v4.new_code_cell(_LOOK_AT_AXES)]
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=240, kernel_name="python3", resources=resources).execute()
    content.cells = cells
    return content
