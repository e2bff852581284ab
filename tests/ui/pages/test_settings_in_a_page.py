"""The settings form in a page: help, bad values while they are typed, changes and how they are taken back,
copies, and that nothing is cut off."""

from __future__ import annotations

import re
from typing import Any

import pytest
from lab import Lab, Notebook, screenshot
from playwright.sync_api import Locator, Page, expect

from nbgpu.config import own_file

pytestmark = [pytest.mark.browser, pytest.mark.subshells, pytest.mark.timeout(900)]

CUT_OFF = """() => {
    const panel = document.querySelector('.nbgpu-controls');
    const edge = panel.getBoundingClientRect();
    const wide = [];
    for (const each of [panel, ...panel.querySelectorAll('*')]) {
        const box = each.getBoundingClientRect();
        if (!box.width || each.closest('.nbgpu-help')) continue;
        const style = getComputedStyle(each);
        const named = `${each.tagName} ${each.className} ${each.textContent.slice(0, 30)}`;
        if (box.right > edge.right + 1 || box.left < edge.left - 1) wide.push(`beyond the panel: ${named}`);
        // Inline elements have no width of their own, and a text box scrolls what is typed.
        const holds = each.clientWidth && !['INPUT', 'SELECT', 'TEXTAREA'].includes(each.tagName);
        if (holds && style.overflowX !== 'auto' && each.scrollWidth > each.clientWidth + 1) {
            wide.push(`wider than its box: ${named}`);
        }
    }
    return wide;
}"""
"""The elements of the controls that reach beyond the panel or have more in them than they show."""


def field(page: Page, label: str) -> Locator:
    return page.get_by_label(label, exact=True)


def around(page: Page, label: str) -> Locator:
    return page.locator(".nbgpu-field", has=field(page, label))


def alerts(page: Page) -> Locator:
    return page.get_by_role("alert").filter(has_text=re.compile("."))


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def opened(lab: Lab, page: Page, name: str, code: str, width: int = 900) -> Notebook:
    page.set_viewport_size({"width": width, "height": 900})
    lab.write_notebook(name, [code])
    notebook = Notebook(page, lab, name)
    notebook.open()
    # The room beside the notebook is not the panel's.
    page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")
    notebook.run_cell(0)
    notebook.wait_until_idle()
    expect(field(page, "Batch size")).to_be_visible()
    return notebook


def in_kernel(notebook: Notebook, code: str) -> Any:
    return notebook.in_kernel(code).strip()


def test_a_person_fills_in_the_form_and_takes_it_back(lab: Lab, page: Page) -> None:
    own_file.create(str(lab.root / "my_recipe.py"))
    code = (
        "import nbgpu\nfrom nbgpu.ui.controls import control_panel\n"
        "panel = control_panel._Controls('autoencoder', None)\npanel.display()"
    )
    notebook = opened(lab, page, "form.ipynb", code)

    # Help comes with the keyboard and the pointer, and is no part of the order of focus.
    size = field(page, "Batch size")
    helps = page.locator(".nbgpu-help").filter(visible=True)
    expect(helps).to_have_count(0)
    field(page, "Mixed precision").focus()
    page.keyboard.press("Tab")
    expect(size).to_be_focused()
    expect(helps).to_have_text("samples for each rank and micro-batch (1 to 4096)batch_size, by default 2")
    page.keyboard.press("Escape")
    expect(helps).to_have_count(0)
    expect(size).to_be_focused()
    field(page, "Cache rate").hover()
    expect(helps).to_contain_text("share of the rank's data kept decoded in host memory")
    around(page, "Steps").locator(".nbgpu-mark").click()
    expect(helps.filter(has_text="optimizer steps in all")).to_have_count(1)

    # What is typed is judged before it is the value, and what follows from it is there at once.
    size.press("Control+a")
    size.press_sequentially("0x")
    expect(alerts(page)).to_have_text(["'0x' is not a whole number. Give a value within: 1 to 4096"])
    expect(size).to_be_focused()
    expect(size).to_have_value("0x")
    expect(size).to_have_attribute("aria-invalid", "true")
    assert in_kernel(notebook, "print(panel._settings.fields['batch_size'].value)") == "2"
    size.press("Control+a")
    size.press_sequentially("6")
    expect(around(page, "Batch size").locator(".nbgpu-note")).to_have_text("global batch 12 = 6 x 2 ranks")
    expect(alerts(page)).to_have_count(0)
    assert in_kernel(notebook, "print(panel._settings.fields['batch_size'].value)") == "2"
    # Leaving the field makes it the value, and marks the change; the way back comes behind the field.
    size.press("Tab")
    expect(size).to_have_accessible_description(re.compile("changed$"))
    expect(button(page, "Reset Batch size to 2")).to_be_visible()
    size.focus()
    page.keyboard.press("Tab")
    expect(button(page, "Reset Batch size to 2")).to_be_focused()
    expect(button(page, "Reset all (1 changed)")).to_be_enabled()
    page.get_by_role("tab", name="Data", exact=True).click()
    field(page, "Replace rate").fill("0.5")
    expect(alerts(page)).to_have_text([re.compile("^replace_rate=0.5 replaces nothing while cache_rate=1 ")])
    field(page, "Cache rate").fill("0.5")
    expect(alerts(page)).to_have_count(0)
    field(page, "Cache rate").press("Tab")

    # Another recipe has the batch size too, and another default for nothing that was changed.
    field(page, "Recipe").select_option("survival")
    expect(page.get_by_role("tab", name="Model", exact=True)).to_be_visible()
    expect(size).to_have_value("6")
    expect(button(page, "Reset all (3 changed)")).to_be_enabled()
    expect(field(page, "Recipe").locator("option", has_text="my_recipe.py")).to_have_count(1)
    button(page, "Reset Batch size to 16").click()
    expect(size).to_have_value("16")
    expect(size).to_be_focused()
    field(page, "Preset").select_option("mace")
    expect(around(page, "Batch size").locator(".nbgpu-note")).to_contain_text(
        "(global_batch_size=24 decides)"
    )
    button(page, "Reset all (2 changed)").click()
    expect(button(page, "Reset all")).to_be_disabled()
    assert in_kernel(notebook, "print(panel._settings.form.changed)") == "[]"


def test_settings_are_copied_or_can_be_where_the_clipboard_is_denied(lab: Lab, page: Page) -> None:
    opened(lab, page, "copy.ipynb", "import nbgpu\nnbgpu.controls('autoencoder')")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    field(page, "Batch size").fill("4")
    field(page, "Batch size").press("Tab")
    expect(button(page, "Reset all (1 changed)")).to_be_enabled()
    button(page, "Copy as command").click()
    expect(page.get_by_text("Copied: paste it into a terminal")).to_be_visible()
    command = "nbgpu train autoencoder --batch-size 4 --gpus none --ranks 2"
    assert page.evaluate("() => navigator.clipboard.readText()") == command

    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('denied')); }")
    button(page, "Copy as code").click()
    shown = page.get_by_label("The settings as code")
    expect(shown).to_be_focused()
    expect(shown).to_have_value(re.compile(r'cluster\.train\("autoencoder", batch_size=4\)$'))
    assert page.evaluate("() => getSelection().toString()").endswith("batch_size=4)")


@pytest.mark.parametrize(
    "recipe", ["autoencoder", pytest.param("survival", marks=[pytest.mark.long, pytest.mark.release])]
)
def test_nothing_is_cut_off(lab: Lab, page: Page, recipe: str) -> None:
    notebook = opened(lab, page, f"{recipe}.ipynb", f"import nbgpu\nnbgpu.controls({recipe!r})")
    # What is wrong takes room as well.
    field(page, "Batch size").fill("0")
    expect(alerts(page)).to_have_count(1)
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        notebook.set_theme(theme)
        # 450 pixels are what 900 are at a zoom of 200 %.
        for width in (1600, 900, 450):
            page.set_viewport_size({"width": width, "height": 900})
            for tab in page.get_by_role("tab").filter(visible=True).all():
                if tab.locator("xpath=ancestor::*[contains(@class, 'nbgpu-controls')]").count():
                    tab.click()
                    assert page.evaluate(CUT_OFF) == [], (theme, width, tab.inner_text())
            screenshot(page, f"form-{recipe}-{theme.split()[1].lower()}-{width}")
    notebook.set_theme("JupyterLab Light")


def test_after_a_restart_one_line_says_what_to_do(lab: Lab, page: Page) -> None:
    notebook = opened(lab, page, "restarted.ipynb", "import nbgpu\nnbgpu.controls()")
    controls = page.locator(".nbgpu-controls").first
    page.evaluate("() => jupyterapp.shell.currentWidget.context.sessionContext.restartKernel()")
    expect(controls).to_have_class(re.compile("jupyter-widgets-disconnected"))
    said, height_px = controls.evaluate(
        "e => [getComputedStyle(e, '::before').content, e.getBoundingClientRect().height]"
    )
    assert "The kernel has ended. Run this cell again" in said
    assert height_px < 60
    expect(field(page, "Batch size")).to_be_hidden()
    expect(button(page, "Start")).to_be_hidden()
    notebook.wait_for_kernel()
    notebook.run_cell(0)
    notebook.wait_until_idle()
    expect(button(page, "Start")).to_be_visible()
