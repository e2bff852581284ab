"""notebooks/06_memory.ipynb runs, and what its text says of the memory holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from notebook_run import executed

pytestmark = [pytest.mark.long, pytest.mark.release]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    content = executed("06_memory.ipynb", tmp_path_factory.mktemp("notebook"))
    return [cell for cell in content.cells if cell.cell_type == "code"]


def printed(cells: list[Any], piece: str) -> str:
    (found,) = [cell for cell in cells if piece in cell.source]
    return "".join(output.text for output in found.outputs if output.output_type == "stream")


def test_activations_take_most_and_adamw_twice_the_weights(cells: list[Any]) -> None:
    said = printed(cells, "tensors.idxmax()")
    assert "most are activations" in said
    assert "optimizer state: 2.0 times the parameters" in said


def test_twice_the_batch_takes_less_than_twice_as_predicted(cells: list[Any]) -> None:
    said = printed(cells, "the prediction for 8")
    measured, off = re.findall(r"measured ([\d.]+)", said), re.findall(r"off by ([+-][\d.]+)%", said)
    assert 1.3 < float(measured[0]) < 2.0
    assert abs(float(off[0])) < 10


def test_both_savings_are_more_than_each_and_less_than_the_sum(cells: list[Any]) -> None:
    amp, checkpointing, both = (int(each) for each in re.findall(r"(\d+)%", printed(cells, "both save")))
    assert max(amp, checkpointing) < both < amp + checkpointing


def test_fsdp_keeps_less_with_more_ranks_and_ddp_does_not(cells: list[Any]) -> None:
    said = re.findall(r"ranks: (\d+) MiB on each with DDP, (\d+) MiB with FSDP", printed(cells, "mib["))
    ddp, fsdp = zip(*((int(a), int(b)) for a, b in said), strict=True)
    assert len(set(ddp)) == 1
    assert fsdp[0] > fsdp[1] > fsdp[2]


def test_what_is_predicted_says_so(cells: list[Any]) -> None:
    titles = [
        output.data["application/vnd.plotly.v1+json"]["layout"]["title"]["text"]
        for cell in cells
        for output in cell.outputs
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(titles) == 4
    assert titles[0].startswith("Memory, measured")
    assert all("predicted" in title for title in titles)
