"""A study in a real JupyterLab: watched, stopped, gone on with, and there after the notebook is saved."""

from __future__ import annotations

import re

import pytest
from lab import Lab, Notebook, screenshot
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.long]

STUDY = """
import nbgpu
settings = dict(gpus="none", patch_size=16, threads=1, measured_steps=6, warm_up_steps=1)
study = nbgpu.scaling("autoencoder", ranks=[1, 2], repeats=3, **settings)
study
""".strip()


@pytest.mark.release
@pytest.mark.subshells
@pytest.mark.timeout(900)
def test_a_study_is_watched_stopped_and_gone_on_with(lab: Lab, page: Page) -> None:
    lab.write_notebook("study.ipynb", [STUDY, "study.resume().wait()", "print(study.explain())"])
    notebook = Notebook(page, lab, "study.ipynb")
    notebook.open()
    notebook.run_cell(0)
    line = page.locator(".nbgpu-study-line").first
    expect(line).to_contain_text(
        re.compile("measuring: [1-5] of 6 repeats done; now ranks = .* left"), timeout=240_000
    )
    page.get_by_role("img", name="Charts of the study").first.locator("svg").first.wait_for()
    screenshot(page, "study")
    page.locator(".jupyter-button", has_text="Stop").click()
    expect(line).to_contain_text("stopped: ", timeout=240_000)
    expect(page.locator(".jupyter-button", has_text="Stop")).to_have_count(0)

    notebook.run_cell(1)
    expect(page.locator(".nbgpu-study-line").last).to_contain_text("finished: 6 of 6", timeout=240_000)
    notebook.wait_until_idle()
    notebook.run_cell(2)
    notebook.wait_until_idle()
    screenshot(page, "study-finished")
    page.set_viewport_size({"width": 900, "height": 1000})
    notebook.set_theme("JupyterLab Dark")
    screenshot(page, "study-dark-900")
    notebook.set_theme("JupyterLab Light")
    saved = notebook.save()
    assert "finished: 6 of 6" in str([o.get("data") for o in saved.cells[1].outputs])
    # The line of `wait` comes first, and is whole at the end.
    assert "finished: 6 of 6" in saved.cells[1].outputs[0].data["text/plain"]
    assert re.search("bounds? this run|largest part of a step", str(saved.cells[2].outputs))
