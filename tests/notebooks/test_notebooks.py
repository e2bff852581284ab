"""The notebooks as files: short cells, no saved outputs, nothing tied to one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request: pytest.FixtureRequest) -> Any:
    path: Path = request.param
    return nbformat.read(path, as_version=4)


def test_there_is_a_first_notebook() -> None:
    assert NOTEBOOKS[0].name == "00_first_run.ipynb"


def test_a_notebook_is_valid_and_begins_with_its_title(notebook: Any) -> None:
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")


def test_a_cell_has_at_most_ten_lines(notebook: Any) -> None:
    long = [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and len(cell.source.splitlines()) > 10
    ]
    assert not long


def test_a_notebook_is_kept_without_outputs(notebook: Any) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert "widgets" not in notebook.metadata


def test_a_notebook_runs_on_any_python_kernel(notebook: Any) -> None:
    assert notebook.metadata.kernelspec.name == "python3"
