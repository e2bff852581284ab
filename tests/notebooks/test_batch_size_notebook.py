"""notebooks/05_batch_size_and_learning_rate.ipynb runs, and what its text says of the curves holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from notebook_run import executed

pytestmark = [pytest.mark.long, pytest.mark.release]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each code cell printed, by its source."""
    fewer = {"12800": "3840"}
    content = executed("05_batch_size_and_learning_rate.ipynb", tmp_path_factory.mktemp("notebook"), fewer)
    return {
        cell.source: "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in content.cells
        if cell.cell_type == "code"
    }


def numbers(said: dict[str, Any], piece: str, pattern: str) -> list[float]:
    (text,) = [printed for source, printed in said.items() if piece in source]
    return [float(found) for found in re.findall(pattern, text)]


def test_the_same_global_batch_gives_the_same_curve(said: dict[str, str]) -> None:
    differences = numbers(said, 'reference = same["one rank, 128"]', r"at most ([\d.e+-]+) of")
    assert len(differences) == 3
    assert max(differences) < 1e-4


def test_a_larger_batch_needs_a_larger_learning_rate(said: dict[str, str]) -> None:
    same, no_rule, sqrt, linear = numbers(said, "for name, loss in rules", r"([\d.]+) times that of 128")
    assert same == 1.0
    assert no_rule > sqrt > linear
    # The linear rule comes closest.
    assert abs(linear - 1) < 0.3
