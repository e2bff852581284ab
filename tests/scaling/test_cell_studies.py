"""`%%scaling`: the step() of a cell, timed on growing groups in a real kernel."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

import launching
import pytest
from kernel import Kernel, kernel

CELL = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(8, 8))
def step():
    model(torch.randn(4, 8)).sum().backward()
    return 4
"""


@pytest.fixture
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        yield started


def test_a_cell_is_timed_on_growing_groups_and_the_ranks_that_stay_keep_their_variables(
    notebook: Kernel,
) -> None:
    notebook.run("%%distributed\nkept = rank")
    done = notebook.run(f"%%scaling --ranks 1,2 --repeats 2 --steps 4 --warm-up 1 --into found{CELL}")
    assert done.status == "ok", done.error
    assert done.stderr == ""
    last = done.updates[-1]
    assert "4 of 4 repeats done" in last["text/plain"]
    # The charts are an image, which a notebook that is not trusted shows too.
    (chart,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', last["text/html"])
    assert (
        "Speed-up by ranks (weak scaling), measured: step() of the cell" in base64.b64decode(chart).decode()
    )
    frame = notebook.run("print(*found.frame()['samples_per_step'], (found.frame()['step_s'] > 0).all())")
    assert frame.stdout == "4 8 True\n"
    assert notebook.run("%%distributed\nprint(globals().get('kept'))").said(0, 1) == [["0"], ["None"]]


@pytest.mark.long
def test_a_cell_without_step_is_a_gap_that_says_so(notebook: Kernel) -> None:
    done = notebook.run("%%scaling --ranks 1,2 --repeats 1\nstep = 3")
    assert done.status == "ok"
    assert "It must be a function without arguments" in done.updates[-1]["text/plain"]
    assert notebook.run("%%distributed\nprint(world_size)").stdout == "[0-1] 2\n"


def test_bad_input_is_refused_before_anything_starts(notebook: Kernel) -> None:
    refused = {
        "--ranks 0,1": "ranks = 0 is not valid",
        "--ranks 1,1": "different numbers",
        "--mode other": "mode = 'other' is not valid",
    }
    for line, said in refused.items():
        done = notebook.run(f"%%scaling {line}{CELL}")
        assert done.status == "error"
        assert said in done.error
        assert done.displays == []
