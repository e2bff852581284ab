"""notebooks/12_microstructure.ipynb runs to its end, and what it finds is worth finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
@pytest.mark.release
def test_the_notebook_finds_a_volume_and_draws_it(tmp_path: Path) -> None:
    content = executed("12_microstructure.ipynb", tmp_path, {"steps=200": "steps=60"})
    cells = {cell.source: cell.outputs for cell in content.cells if cell.cell_type == "code"}
    drawn = [source for source, outputs in cells.items() if any("image/png" in o.get("data", {}) for o in outputs)]
    assert len(drawn) == 6
    live = [o for o in cells[next(s for s in cells if "run.panel()" in s)] if "text/html" in o.get("data", {})]
    assert any("step 60: the volume as a block" in o.data["text/html"] for o in live)
    (shown,) = [o.data["text/plain"] for o in cells["run.show_result()"] if "data" in o]
    header, *rows = [line.split() for line in shown.splitlines() if "s2_error" in line or line[:6] in ("found ", "pixels")]
    # What was found, and voxels at random.
    errors = [float(row[-len(header) :][header.index("s2_error")]) for row in rows]
    assert errors[0] < errors[1] / 4
