"""Notebook 7 and the classic notebook: cells, Stop below a cell, controls, panel, and what is saved."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from lab import ClassicNotebook, Lab, Notebook, Notebook7, screenshot
from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.subshells]

START = "%load_ext nbgpu\nimport nbgpu\n%nbgpu start --gpus none --ranks 2"
WAITS = "%%distributed\nkept = 7 * rank\nif rank == 0: dist.barrier()"
CHECK = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nprint(int(total), kept)"
CONTROLS = "nbgpu.controls('autoencoder')"
BLOCK = "import time\ntime.sleep(20)"
STOP = "%nbgpu stop"
WIDGET = "application/vnd.jupyter.widget-view+json"
PATIENCE_MS = 240_000


def button(page: Page, name: str) -> Locator:
    return page.locator(".jupyter-button", has_text=name)


def fill(page: Page, name: str, value: str) -> None:
    field = page.get_by_label(name, exact=True).and_(page.locator("input"))
    field.fill(value)
    field.blur()  # with Tab the help of the next field would cover the tabs


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("package", "kind"), [("notebook", Notebook7), ("nbclassic", ClassicNotebook)])
def test_a_run_and_what_stays_of_it(package: str, kind: type[Notebook], lab: Lab, page: Page) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: it is one of the packages for tests in pyproject.toml")
    name = f"{package}.ipynb"
    lab.write_notebook(name, [START, WAITS, CHECK, CONTROLS, BLOCK, STOP])
    page.set_viewport_size({"width": 1280, "height": 1500})
    notebook = kind(page, lab, name)
    notebook.open()
    notebook.run_cell(0)
    notebook.wait_until_idle()

    notebook.run_cell(1)
    button(page, "Stop").click()
    notebook.wait_until_idle()
    notebook.run_cell(2)
    notebook.wait_until_idle()

    notebook.run_cell(3)
    page.get_by_role("tab", name="Data", exact=True).click()
    fill(page, "Data", "phantoms")
    fill(page, "Patch size", "8")
    page.get_by_role("tab", name="Run", exact=True).click()
    fill(page, "Steps", "5000")
    button(page, "Start").click()
    state = page.locator(".nbgpu-state")
    expect(state).to_have_text("training", timeout=PATIENCE_MS)
    page.locator("[data-chart=loss] .js-plotly-plot").wait_for()
    if kind is Notebook7:
        # The buttons act while a cell is running, which would hold them up for longer than is waited here.
        notebook.run_cell(4)
        page.wait_for_timeout(500)
    button(page, "Pause").click()
    expect(state).to_have_text("paused", timeout=240_000)
    screenshot(page, f"controls-{package}")
    button(page, "Stop").click()
    page.locator(".nbgpu").wait_for(state="detached", timeout=PATIENCE_MS)
    expect(button(page, "Start")).to_be_enabled()
    notebook.wait_until_idle()
    notebook.run_cell(5)
    notebook.wait_until_idle()

    _, stopped, checked, controls, *_ = notebook.save().cells
    assert "the cell was stopped" in "".join(stopped.outputs[-1].traceback)
    assert all(WIDGET not in output.get("data", {}) for output in stopped.outputs)
    assert "2 7" in checked.outputs[0].text
    assert "autoencoder: stopped, step " in controls.outputs[-1].data["text/plain"]
    page.reload()
    notebook.wait_for_kernel()
    # Without a hand on it plotly's renderer in Notebook 7 shows the picture that it has saved.
    picture = page.locator('.output_html img[src^="data:image/svg"], .jp-RenderedPlotly img').first
    expect(picture).to_be_visible()
    # The page may still replace the outputs of a notebook that it has just opened.
    picture.evaluate("picture => picture.scrollIntoView()")
    screenshot(page, f"picture-{package}")
