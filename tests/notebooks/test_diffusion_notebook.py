"""notebooks/10_diffusion.ipynb runs to its end and draws what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
@pytest.mark.release
def test_the_notebook_trains_and_samples_on_all_ranks(tmp_path: Path) -> None:
    content = executed(
        "10_diffusion.ipynb", tmp_path, {"steps=200": "steps=40, num_phantoms=64, val_cases=4"}
    )
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 2
    tables = [output.data["text/plain"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("voxelwise quadratic" in table for table in tables)
    (by_steps,) = [table for table in tables if table.split()[:2] == ["psnr_db", "ssim"] and "steps" in table]
    rows = [line.split() for line in by_steps.splitlines()[2:]]
    assert [row[0] for row in rows] == ["2", "4", "11"]
    assert all(float(row[1]) > 8 for row in rows)
    (made,) = [table for table in tables if "tumour_psnr_db" in table and "head 64" in table]
    assert len(made.splitlines()) == 9
