"""notebooks/04_what_ddp_does.ipynb runs, what its text says holds, and its pictures say what they are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from notebook_run import executed

pytestmark = [pytest.mark.long, pytest.mark.release]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    content = executed(
        "04_what_ddp_does.ipynb", tmp_path_factory.mktemp("notebook"), {"repeats=2": "repeats=1"}
    )
    return [cell for cell in content.cells if cell.cell_type == "code"]


def printed(cells: list[Any], piece: str) -> str:
    (found,) = [cell for cell in cells if piece in cell.source]
    return "".join(output.text for output in found.outputs if output.output_type == "stream")


def titles(cell: Any) -> list[str]:
    """The titles of a cell's figures."""
    layouts = [
        output.data["application/vnd.plotly.v1+json"]["layout"]
        for output in cell.outputs
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    return [
        layout.get("title", {}).get("text", "") + " ".join(a["text"] for a in layout.get("annotations", []))
        for layout in layouts
    ]


def test_a_part_of_the_exchange_is_hidden_and_the_rest_makes_the_step_longer(cells: list[Any]) -> None:
    (table,) = [
        output.data["text/plain"] for cell in cells if "typical =" in cell.source for output in cell.outputs
    ]
    rows = [line.split() for line in table.splitlines() if re.match(r"[01]\s", line)]
    assert all(float(hidden_ms) > 0 for _, _, hidden_ms, *_ in rows)
    assert "ms more" in printed(cells, "longer_ms")
    (said,) = [
        output.data["text/plain"]
        for cell in cells
        if cell.source == "slow.explain()"
        for output in cell.outputs
    ]
    # On a busy machine the wait for the slower rank may be longer than the exchange.
    assert said.startswith(("Communication bounds this run", "Imbalance bounds this run"))


def test_bucket_sizes_are_compared_and_one_repeat_decides_nothing(cells: list[Any]) -> None:
    measured = re.findall(r"([\d.]+) MiB: [1-9]\d* samples/s", said := printed(cells, "sizes.verdict()"))
    assert {"0.05", "1"} <= set(measured)
    assert re.search(r"guessed 1; not decided: bucket_mb=[\d.]+ with .* one repeat has no interval", said)


def test_half_the_bytes_bring_more_samples(cells: list[Any]) -> None:
    """At most twice as many in truth; what is measured beside other work on the machine may be more."""
    (brought,) = re.findall(r"measured ([\d.]+)", printed(cells, "times_as_many"))
    assert 1.1 < float(brought) < 3


def test_modelled_and_simulated_pictures_say_so(cells: list[Any]) -> None:
    found = {cell.source: titles(cell) for cell in cells}
    over_a_link = [source for source in found if "slow.timeline" in source or "nbgpu.study" in source]
    assert len(over_a_link) == 3
    for source in over_a_link:
        assert all("simulated link" in title for title in found[source]), source
        assert found[source]
    (modelled,) = [title for source, title in found.items() if "times.predict" in source]
    assert all("modelled" in title for title in modelled)
    (sliders,) = [cell for cell in cells if "nbgpu.overlap" in cell.source]
    assert sliders.outputs[-1].data["text/plain"].startswith("modelled: a step of 2 ranks over 10GbE")
