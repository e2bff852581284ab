"""notebooks/11_survival.ipynb runs to its end and shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
@pytest.mark.release
def test_the_notebook_learns_hazards_and_draws_risk_groups(tmp_path: Path) -> None:
    changes = {'train("survival")': 'train("survival", steps=10, num_patients=80, val_every=5)'}
    content = executed("11_survival.ipynb", tmp_path, changes)
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    tables = [output.data["text/plain"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("true hazard" in table and "c_index" in table for table in tables)
    (shown,) = [cell.outputs for cell in content.cells if cell.source == "run.show_result()"]
    assert sum(output.data["text/html"].count('src="data:image/png') for output in shown) == 2
    told = "".join(str(output.get("text", "")) + str(output.get("data", "")) for output in outputs)
    assert "of all samples" in told
    assert "16 of 16 predicted" in told
    assert any("risk_group" in table and "patient 80" in table for table in tables)
