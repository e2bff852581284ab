"""notebooks/14_microstructure.ipynb runs to its end, and what it finds is worth finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
def test_the_notebook_finds_a_volume_and_draws_it(tmp_path: Path) -> None:
    content = executed("14_microstructure.ipynb", tmp_path, {"steps=200": "steps=60"})
    cells = {cell.source: cell.outputs for cell in content.cells if cell.cell_type == "code"}
    drawn = [source for source, outputs in cells.items() if any("image/png" in o.get("data", {}) for o in outputs)]
    assert len(drawn) == 6
    live = [o for o in cells[next(s for s in cells if "run.panel()" in s)] if "text/html" in o.get("data", {})]
    assert any("step 60: the volume as a block" in o.data["text/html"] for o in live)
    (table,) = [o for o in cells[next(s for s in cells if "import pandas" in s)] if "data" in o]
    found, at_random = (float(row.split()[-2]) for row in table.data["text/plain"].splitlines()[1:])
    assert found < at_random / 4
