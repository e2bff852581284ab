"""notebooks/02_your_own_recipe.ipynb runs to its end, and its recipe learns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
@pytest.mark.release
def test_the_notebook_trains_and_sweeps_a_recipe_of_its_own(tmp_path: Path) -> None:
    changes = {"!nbgpu": f"!{sys.executable} -m nbgpu.cli", "steps=200": "steps=60, gpus='none'"}
    content = executed("02_your_own_recipe.ipynb", tmp_path, changes)
    cells = {cell.source: cell.outputs for cell in content.cells if cell.cell_type == "code"}
    (drawn,) = [outputs for source, outputs in cells.items() if "load_trained" in source]
    assert any("image/png" in output.get("data", {}) for output in drawn)
    (swept,) = [outputs for source, outputs in cells.items() if "nbgpu.sweep" in source]
    table = swept[-1]
    rows = table.data["text/plain"].splitlines()[1:]
    assert [row.split()[2] for row in rows] == ["finished"] * 2
    assert sorted(int(row.split()[1]) for row in rows) == [4, 64]
