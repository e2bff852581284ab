"""Runs one of the project's notebooks on CPU ranks, as if the machine had so many GPUs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import nbformat
from conftest import REPOSITORY, SUPPORT
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


# A notebook about several ranks is run as on a machine with one GPU. Where there are two or none it has two
# ranks as well.
_PRETEND_ONE_GPU = f"""
import sys

sys.path.append({str(SUPPORT)!r})
import pretend_gpus

pretend_gpus.install(pretend_gpus.several(1))
"""
_FOR_SEVERAL = "%nbgpu start --at-least 2"
_START = re.compile(r"^%nbgpu start(?= *$)", re.MULTILINE)


def executed(
    name: str,
    folder: Path,
    changes: Mapping[str, str] | None = None,
    ranks: int = 2,
    only: Collection[str] | None = None,
) -> Any:
    """The notebook with its outputs.

    Every axis of every figure that matplotlib draws must have a name.

    Args:
        name: its file in notebooks/.
        folder: where its kernel runs.
        changes: what stands in its cells, and what is put in the place of it.
        ranks: how many ranks a plain `%nbgpu start` gives, which is one for each GPU of a machine. A notebook
            that asks for two at least gets them whatever there is, and is run as with one GPU.
        only: run only the code cells that have one of these pieces; None for all.
    """
    content = nbformat.read(REPOSITORY / "notebooks" / name, as_version=4)
    cells = content.cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    if only is not None:
        for piece in only:
            assert any(piece in cell.source for cell in code), piece
        cells = code = [cell for cell in code if any(piece in cell.source for piece in only)]
    for cell in code:
        cell.source = _START.sub(f"%nbgpu start --gpus none --ranks {ranks}", cell.source)
        for old, new in (changes or {}).items():
            cell.source = cell.source.replace(old, new)
    first = [_PRETEND_ONE_GPU] if any(_FOR_SEVERAL in cell.source for cell in code) else []
    content.cells = [
        *map(nbformat.v4.new_code_cell, [*first, _WATCH_AXES]),
        *cells,
        nbformat.v4.new_code_cell(_LOOK_AT_AXES),
    ]
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=600, kernel_name="python3", resources=resources).execute()
    content.cells = cells
    return content
