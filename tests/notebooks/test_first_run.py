"""notebooks/00_first_run.ipynb, the README's first command, runs with as many ranks as a machine has GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from notebook_run import executed

SMALL = {"steps=1000, val_every=200": "num_phantoms=24, steps=4, val_every=2"}


def outputs(content: Any, piece: str) -> Any:
    (found,) = [cell.outputs for cell in content.cells if cell.cell_type == "code" and piece in cell.source]
    return found


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_it_runs_to_its_end(ranks: int, tmp_path: Path) -> None:
    content = executed("00_first_run.ipynb", tmp_path, SMALL, ranks)
    # The sum of the ranks' numbers, on whatever rank.
    total = f"{sum(range(ranks))}."
    assert outputs(content, "%pull")[-1].data["text/plain"] == f"tensor([{total}, {total}, {total}])"
    table = outputs(content, 'groupby("rank")')[-1].data["text/plain"].splitlines()
    assert [line.split()[0] for line in table[2:]] == [str(rank) for rank in range(ranks)]
    assert all(line.split()[-1] == "4" for line in table[2:])
    said = "".join(output.get("text", "") for output in outputs(content, "gain_db ="))
    assert re.search(r"gain of the autoencoder over it: [+-][\d.]+ dB", said)
