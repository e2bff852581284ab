"""What stays of a run in the notebook: at its end, after a reload, in the saved file, without its kernel."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest
from conftest import SUPPORT
from lab import Lab, Notebook, screenshot
from nbconvert import HTMLExporter
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.long]

PLOTLY = "application/vnd.plotly.v1+json"

OPEN_WITHOUT_KERNEL = """path => jupyterapp.commands.execute('docmanager:open', {
    path, factory: 'Notebook', kernelPreference: { shouldStart: false, canStart: false },
})"""


IS_TRUSTED = """path => [...jupyterapp.shell.widgets('main')].find(w => w.context?.path === path)
    .content.widgets[0].model.trusted"""


def recorded_run(steps: int) -> str:
    return f"""
import sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
from recorded import RecordedRun
from nbgpu.ui.run.panel import show
folder = Path(tempfile.mkdtemp(dir='.', prefix='a run ')).absolute()
(folder / 'run.toml').write_text('recipe = "autoencoder"')
run = RecordedRun(folder, steps={steps}, step_s=0.03)
show(run)
""".strip()


GO_ON_TO_STEP_40 = """
import time
run.resume()
while run.statuses()[0].step < 40:
    time.sleep(0.02)
run.pause()
"""


def expect_the_whole_head(page: Page) -> None:
    head = page.locator(".nbgpu-still")
    expect(head).to_be_visible()
    for words in (
        "autoencoder",
        "finished",
        "step 150 of 150",
        "rank 1",
        "GPU 1 NVIDIA H200",
        "validation: psnr (dB)",
        "18.5 (step 25)",  # the lowest
        "trilinear",
        "<b>made up</b>",
        "What happened (5)",  # two pauses and three checkpoints
    ):
        expect(head).to_contain_text(words)
    expect(head.get_by_role("link", name="report")).to_have_count(1)


@pytest.mark.subshells
@pytest.mark.timeout(900)
def test_the_head_of_a_run_stays(lab: Lab, page: Page) -> None:
    document = lab.write_notebook("stays.ipynb", [recorded_run(steps=150) + "\nrun.pause()"])
    page.set_viewport_size({"width": 1280, "height": 1250})
    notebook = Notebook(page, lab, "stays.ipynb")
    notebook.open()
    notebook.run_cell(0)
    page.locator("[data-chart=loss] .js-plotly-plot").wait_for()
    # However slow the page is, the run waits for it.
    notebook.in_kernel(GO_ON_TO_STEP_40)
    page.wait_for_function(
        "() => document.querySelector('[data-chart=loss] .nbgpu-plot').data?.[0]?.x.length > 30"
    )
    # The head for the case that the kernel dies is in the notebook, and not on the screen.
    page.locator(".nbgpu-still-live").wait_for(state="attached")
    expect(page.locator(".nbgpu-still-live")).to_be_hidden()
    screenshot(page, "live-light")
    page.reload()
    notebook.wait_for_kernel()
    page.locator(".nbgpu-state", has_text="paused").wait_for()
    notebook.in_kernel("run.resume()")

    # The head takes its place, although this page never saw the display being made.
    page.locator(".nbgpu").wait_for(state="detached")
    page.locator(".jp-RenderedPlotly .main-svg").first.wait_for()
    expect_the_whole_head(page)
    screenshot(page, "end-light")
    notebook.set_theme("JupyterLab Dark")
    page.set_viewport_size({"width": 640, "height": 900})
    page.wait_for_timeout(500)
    screenshot(page, "end-dark-narrow")
    page.set_viewport_size({"width": 1280, "height": 1250})
    notebook.set_theme("JupyterLab Light")
    page.get_by_role("link", name="settings").click()
    expect(page.locator(".jp-FileEditor")).to_contain_text('recipe = "autoencoder"')

    page.evaluate("() => jupyterapp.commands.execute('docmanager:open', { path: 'stays.ipynb' })")
    saved = notebook.save()
    head, curves = [o for o in saved.cells[0].outputs if o.get("metadata", {}).get("nbgpu")]
    assert set(head.data) == {"text/html", "text/plain"}
    assert {PLOTLY, "text/html", "text/plain"} <= set(curves.data)
    page.goto("about:blank")
    lab.shut_kernels_down()

    # Another file than the one that this person has run: JupyterLab does not trust it.
    saved.cells[0].source += "\n# changed elsewhere"
    nbformat.write(saved, document.with_name("foreign.ipynb"))
    page.goto(f"{lab.url}/lab?token={lab.token}&reset")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('docmanager:open')")
    page.evaluate(OPEN_WITHOUT_KERNEL, "foreign.ipynb")
    expect_the_whole_head(page)
    assert page.evaluate(IS_TRUSTED, "foreign.ipynb") is False
    screenshot(page, "end-reopened")

    told, _ = HTMLExporter().from_notebook_node(saved)
    document.with_name("page.html").write_text(told)
    page.goto(document.with_name("page.html").as_uri())
    expect_the_whole_head(page)
    page.set_viewport_size({"width": 900, "height": 1000})
    (loss, beside, *_) = page.get_by_role("img", name="Charts of the run: Loss").locator("img").all()
    wide, next_to = loss.bounding_box(), beside.bounding_box()
    assert wide is not None
    assert next_to is not None
    assert wide["width"] > 300
    assert next_to["y"] == wide["y"]
    href = page.get_by_role("link", name="report").get_attribute("href")
    assert href is not None
    assert re.fullmatch(r"a%20run%20\w+/report\.html", href)
    screenshot(page, "end-nbconvert")


@pytest.mark.subshells
@pytest.mark.timeout(900)
def test_what_was_saved_last_is_there_when_the_kernel_dies(lab: Lab, page: Page) -> None:
    lab.write_notebook("crash.ipynb", [recorded_run(steps=5000)])
    notebook = Notebook(page, lab, "crash.ipynb")
    notebook.open()
    notebook.run_cell(0)
    page.locator(".nbgpu-still-live", has_text="training").wait_for(state="attached")
    notebook.save()
    die: Any = "() => jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.requestExecute({ code: 'import os; os._exit(1)' }) && null"
    page.evaluate(die)
    expect(page.locator(".nbgpu-words")).to_contain_text("The kernel is gone")
    page.locator(".nbgpu-still-live img").first.wait_for(state="attached")
    page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    page.reload()
    notebook.wait_for_kernel()
    head, drawn = page.locator(".nbgpu-still-live").all()
    expect(head).to_be_visible()
    # The page has added its curves, as pictures.
    expect(drawn).to_contain_text("The kernel is gone; the run ended with it.")
    expect(drawn.get_by_role("img", name="Loss: rank 0")).to_be_visible()
    expect(head).to_contain_text(re.compile("step [1-9][0-9]* of 5000"))
    expect(head).to_contain_text("nbgpu report")
    expect(head).to_contain_text(re.compile(r"As it was at \d\d:\d\d:\d\d"))
    screenshot(page, "crash-reloaded")
