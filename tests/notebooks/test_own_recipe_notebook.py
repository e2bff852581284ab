"""notebooks/02_your_own_recipe.ipynb runs to its end, and its recipe learns."""

from __future__ import annotations

from pathlib import Path

import nbformat
from conftest import REPOSITORY
from jupyter_core.utils import ensure_event_loop
from nbclient import NotebookClient

# nbclient makes one event loop for the life of the process; made here, it is no single test's leftover.
ensure_event_loop()


def test_the_notebook_trains_and_sweeps_a_recipe_of_its_own(
    tmp_path: Path,
) -> None:
    content = nbformat.read(REPOSITORY / "notebooks" / "02_your_own_recipe.ipynb", as_version=4)
    for cell in content.cells:
        cell.source = cell.source.replace("%nbgpu start", "%nbgpu start --gpus none --ranks 2")
        cell.source = cell.source.replace("!nbgpu", "!{__import__('sys').executable} -m nbgpu.cli")
        cell.source = cell.source.replace("steps=200", "steps=60, gpus='none'")
    NotebookClient(
        content, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = {cell.source: cell.outputs for cell in content.cells if cell.cell_type == "code"}
    (drawn,) = [outputs for source, outputs in cells.items() if "load_trained" in source]
    assert any("image/png" in output.get("data", {}) for output in drawn)
    (swept,) = [outputs for source, outputs in cells.items() if "nbgpu.sweep" in source]
    table = next(o for o in swept if "best val_loss" in o.get("data", {}).get("text/plain", ""))
    rows = table.data["text/plain"].splitlines()[1:]
    assert [row.split()[2] for row in rows] == ["finished"] * 2
    assert sorted(int(row.split()[1]) for row in rows) == [4, 32]
