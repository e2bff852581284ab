"""The control panel explains a run in a page, tries what it advises, and writes the files to leave with."""

from __future__ import annotations

import re

import pytest
from lab import Lab, Notebook, screenshot
from made_runs import RECIPE
from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.subshells]
PATIENCE_MS = 240_000

START = """%load_ext nbgpu
import nbgpu
%nbgpu start --gpus none --ranks 2
nbgpu.controls("made.py")"""
BUSY = "import time\ntime.sleep(25)"

SLOW_STATISTICS = {
    "    norms: int = 0\n": "    norms: int = 20\n    sync_batchnorm: bool = True\n    steps: int = 40\n    val_every: int = 0\n",
    "compute_s: float = 0.05": "compute_s: float = 0.005",
}
"""What is changed of the made recipe, so that its bottleneck needs no settings."""


def button(page: Page, name: str) -> Locator:
    return page.locator(".jupyter-button", has_text=name)


def files_are_written(lab: Lab, page: Page) -> None:
    """Press Export, fill in a form for Slurm, first wrongly, and have the files written."""
    button(page, "Export").click()
    page.get_by_label("For", exact=True).select_option("slurm")
    expect(page.get_by_label("Fewest machines", exact=True)).to_have_count(0)
    page.get_by_label("Machines", exact=True).fill("2")
    page.get_by_label("Time limit", exact=True).fill("soon")
    page.get_by_label("Folder for the files", exact=True).fill("leave")
    button(page, "Write files").click()
    wrong = page.get_by_text("time_limit = 'soon': give [DAYS-]HH:MM:SS")
    expect(wrong).to_be_visible(timeout=PATIENCE_MS)
    assert not (lab.root / "leave").exists()
    screenshot(page, "export-dark-900")
    page.get_by_label("Time limit", exact=True).fill("1:00:00")
    button(page, "Write files").click()
    expect(page.get_by_text("wrote job.sbatch, run.toml")).to_be_visible(timeout=PATIENCE_MS)
    script = (lab.root / "leave" / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --time=1:00:00" in script


@pytest.mark.timeout(900)
def test_a_run_is_explained_and_its_advice_tried(lab: Lab, page: Page) -> None:
    page.set_viewport_size({"width": 900, "height": 1500})
    made = RECIPE
    for before, now in SLOW_STATISTICS.items():
        assert before in made
        made = made.replace(before, now)
    (lab.root / "made.py").write_text(made)
    lab.write_notebook("advice.ipynb", [START, BUSY, "%nbgpu stop"])
    notebook = Notebook(page, lab, "advice.ipynb")
    notebook.open()
    notebook.run_cell(0)
    notebook.wait_until_idle()
    expect(button(page, "Explain")).to_be_disabled()
    button(page, "Start").click()
    page.locator(".nbgpu-state", has_text="training").wait_for(timeout=PATIENCE_MS)
    expect(button(page, "Start")).to_be_enabled(timeout=PATIENCE_MS)
    button(page, "Explain").click()
    expect(page.get_by_text("BatchNorm's statistics bound this run")).to_be_visible()
    screenshot(page, "advice-900")
    # The advice on the statistics is the only one.
    button(page, "Try").click()
    expect(button(page, "Try")).to_be_disabled()
    expect(page.get_by_text(re.compile("^measuring: [1-5] of 6 repeats done"))).to_be_visible(
        timeout=PATIENCE_MS
    )
    notebook.set_theme("JupyterLab Dark")
    line = page.locator(".nbgpu-study-line").bounding_box()
    assert line is not None
    assert line["x"] + line["width"] <= 900
    page.wait_for_timeout(1000)  # the change of the theme covers the page
    screenshot(page, "advice-dark-900")
    button(page, "End trial").click()
    expect(button(page, "Try")).to_be_enabled(timeout=PATIENCE_MS)
    expect(page.get_by_text(re.compile("^stopped: "))).to_be_visible()
    # While a cell is running, the form answers fields and buttons in the order of what the person does.
    notebook.run_cell(1)
    files_are_written(lab, page)
    expect(page.locator(".jp-CodeCell .jp-InputArea-prompt").nth(1)).to_have_text("[*]:")
    notebook.set_theme("JupyterLab Light")
    screenshot(page, "export-900")
    button(page, "Close").click()
    expect(button(page, "Write files")).to_be_hidden()
    notebook.wait_until_idle()
    notebook.run_cell(2)
    notebook.wait_until_idle()
