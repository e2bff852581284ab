"""notebooks/03_scaling.ipynb runs to its end, and its cells show what the text beside them says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from notebook_run import executed

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of each code cell, by its source."""
    changes = {
        "repeats=2, measured_steps=20, warm_up_steps=3": "gpus='none', repeats=1, measured_steps=10, warm_up_steps=1"
    }
    content = executed("03_scaling.ipynb", tmp_path_factory.mktemp("notebook"), changes)
    return {cell.source: cell.outputs for cell in content.cells if cell.cell_type == "code"}


def shown(cells: dict[str, Any], piece: str) -> str:
    """The text of the outputs of the one cell that has this piece."""
    (outputs,) = [found for source, found in cells.items() if piece in source]
    texts = [
        output.text if output.output_type == "stream" else output.data.get("text/plain", "")
        for output in outputs
    ]
    return "\n".join(texts)


def numbers(text: str, pattern: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(each) for each in found.groups()]


def test_the_same_samples_are_shared_out(cells: dict[str, Any]) -> None:
    first, second = (line.split() for line in shown(cells, "strong.wait()").splitlines()[-2:])
    assert (first[1:3], second[1:3]) == (["1", "512"], ["2", "512"])
    # Here each point is measured once, which decides nothing.
    (measured,) = numbers(
        shown(cells, 'speedup = strong.frame()["relative"]'), r"guessed 1.80; not decided: speed-up ([\d.]+);"
    )
    # The table has more digits than the text.
    assert measured == pytest.approx(float(second[5]), abs=0.01)


def test_the_loss_curves_lie_on_top_of_each_other(cells: dict[str, Any]) -> None:
    (apart,) = numbers(shown(cells, "the curves differ"), r"at most ([\d.e+-]+) of")
    assert apart < 0.01
    table = [line.split() for line in shown(cells, "seconds to the loss").splitlines()[-2:]]
    assert [row[0] for row in table] == ["1", "2"]
    for row in table:
        assert float(row[1]) > 0
        assert float(row[2]) > 0


def test_weak_scaling_is_compared_with_strong_scaling(cells: dict[str, Any]) -> None:
    said = shown(cells, "weak_efficiency, strong_efficiency")
    assert re.fullmatch(r"guessed 90%, measured \d+%; not decided: .*\nstrong scaling: \d+%\n", said)


def test_the_law_goes_through_the_measured_point(cells: dict[str, Any]) -> None:
    (fraction,) = numbers(shown(cells, "serial fraction"), r"serial fraction (-?[\d.]+)")
    (speedup,) = numbers(shown(cells, 'speedup = strong.frame()["relative"]'), r"speed-up ([\d.]+)")
    assert 1 / (fraction + (1 - fraction) / 2) == pytest.approx(speedup, abs=0.01)


def test_what_is_modelled_says_so_in_its_title(cells: dict[str, Any]) -> None:
    drawn = [source for source in cells if "plt.title(" in source]
    assert len(drawn) == 1
    assert re.search(r'plt\.title\(".*modelled.*"\)', drawn[0])
    for source, outputs in cells.items():
        if "plt." in source:
            assert any("image/png" in output.get("data", {}) for output in outputs)
