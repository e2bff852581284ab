"""notebooks/13_lithography.ipynb runs to its end and draws what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
@pytest.mark.release
def test_the_notebook_learns_images_and_draws_a_process_window(tmp_path: Path) -> None:
    content = executed("13_lithography.ipynb", tmp_path, {"steps=256": "steps=64, num_masks=96"})
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(drawn) == 4
    tables = [output.data["text/plain"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("edge_nm" in table for table in tables)
    (window,) = [table for table in tables if "defocus_nm" in table]
    widths = [[float(word) for word in line.split()] for line in window.splitlines()[2:]]
    assert [row[0] for row in widths] == [-150, -75, 0, 75, 150]
    assert all(row[1:] == sorted(row[1:]) for row in widths), "more dose prints wider lines"
