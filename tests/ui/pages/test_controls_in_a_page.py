"""The controls of every recipe in a page: plan, search, start and stop; and what is typed wrongly."""

from __future__ import annotations

import re

import pytest
from lab import Lab, Notebook, screenshot
from playwright.sync_api import Locator, Page, expect

from nbgpu.config import TRAIN_CONFIGS, own_file

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.subshells]

# What a Stop in the middle of this import does is test_interrupts's.
START = """%load_ext nbgpu
import nbgpu
%nbgpu start --gpus none --ranks 2
nbgpu.current().execute("import torch._dynamo")"""
STOP = "%nbgpu stop"
TEMPLATE = "my_recipe.py"
RECIPES = [*sorted(TRAIN_CONFIGS), TEMPLATE]
MADE_SMALL = {
    "autoencoder": {"Data": {"Data": "phantoms", "Patch size": "16"}},
    "microstructure": {"Search": {"Correlate over fewer than": "4"}},
}
"""By recipe and group: what is typed so that the first step is soon there. All other fields stay as they
are."""
PATIENCE_MS = 240_000


def field(page: Page, label: str) -> Locator:
    return page.get_by_label(label, exact=True)


def fill(page: Page, label: str, text: str) -> None:
    field(page, label).fill(text)
    field(page, label).press("Tab")


def button(page: Page, name: str) -> Locator:
    return page.locator(".jupyter-button", has_text=name)


def open_group(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


@pytest.mark.release
@pytest.mark.timeout(900)
def test_every_recipe_is_planned_searched_started_and_stopped(lab: Lab, page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 1300})
    own_file.create(str(lab.root / TEMPLATE))
    lab.write_notebook("all.ipynb", [START, *(f"nbgpu.controls({recipe!r})" for recipe in RECIPES), STOP])
    notebook = Notebook(page, lab, "all.ipynb")
    notebook.open()
    notebook.run_cell(0)
    notebook.wait_until_idle()
    for index, recipe in enumerate(RECIPES, start=1):
        notebook.run_cell(index)
        notebook.wait_until_idle()
        for group, typed in MADE_SMALL.get(recipe, {}).items():
            open_group(page, group)
            for label, text in typed.items():
                fill(page, label, text)
        button(page, "Plan").click()
        expect(page.get_by_role("status").filter(has_text="Memory")).to_be_visible(timeout=PATIENCE_MS)
        if button(page, "Find batch size").is_visible():
            button(page, "Find batch size").click()
            expect(page.get_by_role("status").filter(has_text="trying batch sizes")).to_be_visible()
            button(page, "Stop").click()
            stopped = page.get_by_role("alert").filter(has_text=re.compile("^stopped; "))
            expect(stopped).to_be_visible(timeout=PATIENCE_MS)
        button(page, "Start").click()
        page.locator(".nbgpu-state", has_text="training").wait_for(timeout=PATIENCE_MS)
        button(page, "Stop").click()
        expect(button(page, "Start")).to_be_enabled(timeout=PATIENCE_MS)
        assert notebook.in_kernel("print(nbgpu.current().run.status)").strip() == "stopped", recipe
        page.evaluate("() => jupyterapp.commands.execute('notebook:clear-cell-output')")
        expect(button(page, "Plan")).to_have_count(0)
    notebook.run_cell(len(RECIPES) + 1)
    notebook.wait_until_idle()


@pytest.mark.timeout(900)
def test_what_is_typed_wrongly_is_refused_beside_the_field_and_stays(lab: Lab, page: Page) -> None:
    page.set_viewport_size({"width": 900, "height": 1100})
    lab.write_notebook("wrong.ipynb", ["import nbgpu\nnbgpu.controls('survival')"])
    notebook = Notebook(page, lab, "wrong.ipynb")
    notebook.open()
    notebook.run_cell(0)
    notebook.wait_until_idle()
    alerts = page.get_by_role("alert").filter(has_text=re.compile("."))
    expect(button(page, "Start")).to_be_enabled()
    expect(alerts).to_have_count(0)
    meaning = (
        "per rank samples for each rank and micro-batch; those of all ranks are compared with one another "
        "(1 to 4096) global batch 32 = 16 x 2 ranks"
    )
    expect(field(page, "Batch size")).to_have_accessible_description(meaning)

    fill(page, "Batch size", "0")
    expect(alerts).to_have_text(["0 is not valid. Give a value within: 1 to 4096"])
    expect(field(page, "Batch size")).to_have_value("0")
    expect(field(page, "Batch size")).to_have_accessible_description(
        re.compile(r"^0 is not valid. Give a value within: 1 to 4096 per rank samples for each rank")
    )
    fill(page, "Batch size", "3.7")
    expect(alerts).to_have_text(["'3.7' is not a whole number. Give a value within: 1 to 4096"])
    expect(field(page, "Batch size")).to_have_value("3.7")
    open_group(page, "Optimizer")
    fill(page, "Learning rate", "0,001")
    not_a_number = "'0,001' is not a number (with a decimal point it would be 0.001). Give a value within: above 0, at most 10"
    not_whole = "'3.7' is not a whole number. Give a value within: 1 to 4096"
    expect(alerts.filter(visible=True)).to_have_text([not_whole, not_a_number])
    open_group(page, "Cluster")
    fill(page, "CPU ranks", "65")
    open_group(page, "Data")

    # With the keyboard: Start names all of them, shows the first one's group and goes there.
    button(page, "Start").press("Enter")
    said = (
        "Correct this first.\nranks: 65 is not valid. Give a value within: 1 to 64, or leave it empty\n"
        f"Batch size: {not_whole}\nLearning rate: {not_a_number}"
    )
    expect(alerts.last).to_have_text(said.replace("ranks", "CPU ranks", 1))
    expect(field(page, "CPU ranks")).to_be_focused()
    screenshot(page, "wrong-light")
    notebook.set_theme("JupyterLab Dark")
    fill(page, "CPU ranks", "2")
    # What was said before is gone.
    expect(alerts.filter(has_text="Correct this first")).to_have_count(0)
    button(page, "Plan").click()
    expect(field(page, "Batch size")).to_be_focused()
    screenshot(page, "wrong-dark")
    assert notebook.in_kernel("print(nbgpu.client.cluster.cluster._current)") == "None\n"
    notebook.set_theme("JupyterLab Light")


@pytest.mark.timeout(900)
def test_a_saved_form_is_a_table_once_its_kernel_has_ended(lab: Lab, page: Page) -> None:
    lab.write_notebook("saved.ipynb", ["import nbgpu\nnbgpu.controls('survival')"])
    notebook = Notebook(page, lab, "saved.ipynb")
    notebook.open()
    notebook.run_cell(0)
    notebook.wait_until_idle()
    expect(button(page, "Start")).to_be_enabled()
    notebook.save()
    # The page is loaded again, and the kernel still has the form.
    notebook.open()
    expect(button(page, "Start")).to_be_enabled()
    page.goto("about:blank")
    lab.shut_kernels_down()

    notebook.open()
    expect(page.get_by_text("The controls of survival, as they were when this cell ran")).to_be_visible()
    expect(page.locator(".jp-OutputArea table")).to_contain_text("weight_decay")
    expect(page.get_by_text("Error displaying widget")).to_have_count(0)
    expect(button(page, "Start")).to_have_count(0)
    # Nothing was changed by whoever only reads it.
    assert not page.evaluate("() => jupyterapp.shell.currentWidget.context.model.dirty")
    assert "widget-view" in (lab.root / "saved.ipynb").read_text()
