"""notebooks/12_microstructure.ipynb runs to its end, and what it finds is worth finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
def test_the_notebook_finds_a_volume_and_draws_it(tmp_path: Path) -> None:
    content = executed("12_microstructure.ipynb", tmp_path, {"steps=200": "steps=60"})
    cells = {cell.source: cell.outputs for cell in content.cells if cell.cell_type == "code"}
    drawn = [source for source, outputs in cells.items() if any("image/png" in o.get("data", {}) for o in outputs)]
    assert len(drawn) == 6
    live = [o for o in cells[next(s for s in cells if "run.panel()" in s)] if "text/html" in o.get("data", {})]
    assert any("step 60: the volume as a block" in o.data["text/html"] for o in live)
    (table,) = [o for o in cells[next(s for s in cells if "import pandas" in s)] if "data" in o]
    html = table.data["text/html"]
    columns = re.findall(r"<th>([a-z]\w*)</th>", html[: html.index("</thead>")])
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in html[html.index("<tbody>") :].split("</tr>")]
    errors = [float(row[columns.index("s2_error")]) for row in rows if row]
    # What was found, and voxels at random.
    assert errors[0] < errors[1] / 4
