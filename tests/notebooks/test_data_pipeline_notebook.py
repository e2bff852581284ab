"""notebooks/07_data_pipeline.ipynb runs, and what its text says of data and of a starving rank holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from notebook_run import executed

pytestmark = [pytest.mark.long, pytest.mark.release]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    content = executed(
        "07_data_pipeline.ipynb", tmp_path_factory.mktemp("notebook"), {"repeats=2": "repeats=1"}
    )
    return [cell for cell in content.cells if cell.cell_type == "code"]


def printed(cells: list[Any], piece: str) -> str:
    (found,) = [cell for cell in cells if piece in cell.source]
    return "".join(output.text for output in found.outputs if output.output_type == "stream")


def test_ranks_wait_for_volumes_that_are_not_kept(cells: list[Any]) -> None:
    (share,) = re.findall(r"measured (\d+)% of", printed(cells, "share = "))
    assert int(share) > 0
    (gain,) = re.findall(r"measured ([\d.]+); with half", printed(cells, "times_as_many[1.0]"))
    assert float(gain) > 1


def test_the_other_rank_waits_for_the_one_that_starves(cells: list[Any]) -> None:
    (measured_ms,) = re.findall(r"measured (\d+) ms on rank 0", printed(cells, "guess_ms} ms"))
    assert int(measured_ms) >= 80
    assert printed(cells, "starved.explain()").startswith("Data bound this run: rank 1")


def test_workers_keep_the_promise_of_the_advice(cells: list[Any]) -> None:
    said = printed(cells, "nbgpu.try_advice")
    (promised,) = re.findall(r"That is ([\d.]+) times", said)
    (brought,) = re.findall(r"It brought ([\d.]+) times", said)
    # Other work on the machine lengthens the short steps that are left.
    assert float(brought) > 2
    assert float(promised) > 2
