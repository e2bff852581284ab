"""What a page draws of a long run against metrics.csv, pixel by pixel, and what it says when its kernel is
gone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lab import Lab, Notebook, jupyter_lab, screenshot
from playwright.sync_api import Page, expect
from rows import Measured, row

from nbgpu.client.host import ps

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.subshells]

RECIPE = """
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbgpu.recipes.own import OwnRecipe


class Spiky(OwnRecipe):
    val_fraction: float = 0.0
    batch_size: int = 2
    steps: int = 100_000
    val_every: int = 0

    def dataset(self):
        return TensorDataset(torch.rand(4096, 2).pow(8))

    def model(self):
        return nn.Linear(2, 1)

    def loss(self, model, batch):
        time.sleep(0.002)
        loss = (model(batch) - 3 * batch.sum(1, keepdim=True)).square().mean()
        if loss.device.type == "cpu" and loss.requires_grad:
            with Path(__file__).with_name(f"ledger{torch.distributed.get_rank()}.txt").open("a") as ledger:
                ledger.write(f"{loss.item()!r}\\n")
        return loss
"""
START = "%load_ext nbgpu\nimport nbgpu\n%nbgpu start --gpus none --ranks 2"
TRAIN = "run = nbgpu.current().train('spiky.py', threads=1)\nrun.panel()"
ATTACH = "%load_ext nbgpu\nimport nbgpu\n%nbgpu attach\nrun = nbgpu.current().run\nrun.panel()"
PAUSE = """
import time
while min(s.step for s in run.statuses()) < 1500 and not run.over: time.sleep(0.1)
run.pause()
while run.status != "paused" and not run.over: time.sleep(0.1)
time.sleep(2.5)  # metrics.csv is written once a second
print(run.folder)
"""

Column = tuple[float, float]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with jupyter_lab(tmp_path) as lab:
        (lab.root / "spiky.py").write_text(RECIPE)
        yield lab
        ps.stop([], everything=True)


PLOT = """
    const notebook = jupyterapp.shell.currentWidget.content;
    void notebook.scrollToItem(cell, 'start');  // what nobody sees is not painted
    const plot = notebook.widgets[cell].node.querySelector('[data-chart=loss] .nbgpu-plot');
    const trace = plot?.data?.find(t => t.name === `rank ${rank}, raw`);
"""


def drawn(page: Page, cell: int, rank: int, last_step: int) -> dict[str, Any]:
    """What Plotly has drawn of a rank's loss in a cell's panel, up to a step at least, and on which
    pixels."""
    asked = {"cell": cell, "rank": rank, "last": last_step}
    page.wait_for_function(
        f"({{cell, rank, last}}) => {{ {PLOT} return trace?.x.at(-1) >= last; }}", arg=asked
    )
    found: dict[str, Any] = page.evaluate(
        f"""({{cell, rank}}) => {{
            {PLOT}
            const axis = plot._fullLayout.xaxis;
            return {{ x: [...trace.x], y: [...trace.y], range: axis.range, length: axis._length }};
        }}""",
        asked,
    )
    return found


def columns(x: Any, y: Any, picture: dict[str, Any]) -> dict[int, Column]:
    """The lowest and the highest value in each column of pixels."""
    low, high = picture["range"]
    pixels = np.minimum((np.asarray(x) - low) / (high - low) * picture["length"], picture["length"] - 1)
    values = pd.Series(np.asarray(y, dtype=np.float32)).groupby(pixels.astype(int))
    return dict(zip(values.min().index, zip(values.min(), values.max(), strict=True), strict=True))


def check_picture(page: Page, cell: int, folder: Path) -> None:
    """Waits until all is drawn, and compares it with the table."""
    table = pd.read_csv(folder / "metrics.csv", float_precision="round_trip")
    last_step = int(table["step"].max())
    for rank in (0, 1):
        # The recipe itself keeps a list of its losses.
        kept = (folder.parents[1] / f"ledger{rank}.txt").read_text().split()
        assert table[table["rank"] == rank]["loss"].tolist() == [float(loss) for loss in kept[:last_step]]
    for rank in (0, 1):
        picture = drawn(page, cell, rank, last_step)
        own = table[table["rank"] == rank]
        expected = columns(own["step"], own["loss"], picture)
        found = columns(picture["x"], picture["y"], picture)
        # The table lacks the step in which the run was paused, at the picture's end.
        ends = (
            math.floor((last_step - picture["range"][0]) / np.ptp(picture["range"]) * picture["length"]) - 1
        )
        assert len(expected) > 300
        for column in range(ends):
            assert found.get(column) == expected.get(column), f"column {column} of rank {rank}"


@row(
    "the kernel is restarted under a kept run of 1,500 steps and more, and %nbgpu attach takes it up",
    "the old panel says that the kernel is gone, and how to go on; the new one, also reloaded or opened late, has the lowest "
    "and highest value of metrics.csv in every column of pixels",
    bound_s=None,
)
@pytest.mark.timeout(900)
def test_a_past_is_drawn_as_it_was(lab: Lab, page: Page, measured: Measured) -> None:
    start_beside = f"{START}\n%nbgpu stop"
    lab.write_notebook("kept.ipynb", [f"{START} --keep", TRAIN, ATTACH, "run.panel()", start_beside])
    page.set_viewport_size({"width": 1280, "height": 1250})
    notebook = Notebook(page, lab, "kept.ipynb")
    notebook.open()
    for cell in (0, 1):
        notebook.run_cell(cell)
        notebook.wait_until_idle()
    folder = lab.root / notebook.in_kernel(PAUSE).strip()
    check_picture(page, 1, folder)

    notebook.save()
    measured.fault_now()
    page.evaluate("() => jupyterapp.shell.currentWidget.context.sessionContext.restartKernel()")
    words = page.locator(".nbgpu-words")
    expect(words).to_contain_text("The kernel is gone; the run goes on. In the new kernel %nbgpu attach")
    measured.ended(words.inner_text())
    for name in ("Resume", "Stop"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    screenshot(page, "kernel-gone-light")
    notebook.set_theme("JupyterLab Dark")
    page.wait_for_timeout(700)
    screenshot(page, "kernel-gone-dark")
    page.set_viewport_size({"width": 900, "height": 1250})
    page.wait_for_timeout(500)
    screenshot(page, "kernel-gone-900")
    page.set_viewport_size({"width": 1280, "height": 1250})
    notebook.set_theme("JupyterLab Light")

    notebook.wait_for_kernel()
    notebook.run_cell(4)
    notebook.wait_until_idle()
    beside = page.locator(".jp-CodeCell").nth(4)
    expect(beside).to_contain_text(
        re.compile(
            rf"cluster \w+ of this notebook has gone on since .*, with the run {folder.name}, because it was started with --keep\. "
            r"To connect to it: %nbgpu stop, then %nbgpu attach \w+\. To end it: nbgpu stop"
        )
    )

    notebook.run_cell(2)
    notebook.wait_until_idle()
    check_picture(page, 2, folder)
    screenshot(page, "attached")
    notebook.save()

    page.reload()
    notebook.wait_for_kernel()
    check_picture(page, 2, folder)

    notebook.run_cell(3)
    notebook.wait_until_idle()
    check_picture(page, 3, folder)
    notebook.in_kernel("run.stop(); run.wait(400); nbgpu.current().stop()")


@pytest.mark.timeout(900)
def test_a_run_that_is_not_kept_ended_with_its_kernel(lab: Lab, page: Page) -> None:
    """The buttons of the controls are widgets of the kernel, which can no longer disable them."""
    lab.write_notebook("gone.ipynb", [START, "nbgpu.controls('spiky.py')"])
    page.set_viewport_size({"width": 1280, "height": 1250})
    notebook = Notebook(page, lab, "gone.ipynb")
    notebook.open()
    for cell in (0, 1):
        notebook.run_cell(cell)
        notebook.wait_until_idle()
    buttons = {
        name: page.locator(".jupyter-button", has_text=re.compile(f"^{name}$"))
        for name in ("Start", "Pause", "Stop", "Plan", "Find batch size")
    }
    buttons["Start"].click()
    page.locator(".nbgpu-state", has_text="training").wait_for(timeout=240_000)
    expect(buttons["Stop"]).to_be_enabled()

    page.evaluate("() => jupyterapp.shell.currentWidget.context.sessionContext.restartKernel()")
    expect(page.locator(".nbgpu-words")).to_contain_text(
        "The kernel is gone; the run ended with it. Last heard: step "
    )
    expect(page.locator(".nbgpu-state")).to_have_text("kernel gone")
    for button in buttons.values():
        expect(button).to_be_disabled()
    notebook.wait_for_kernel()
