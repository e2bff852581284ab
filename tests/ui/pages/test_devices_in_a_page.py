"""The cards of the control panel in a real page: keyboard, live numbers, and rest while nobody looks. NVML
alone is a stand-in, in the notebook's kernel."""

from __future__ import annotations

import json
import re
import time

import pytest
from conftest import SUPPORT
from lab import Lab, Notebook, screenshot
from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.subshells]

START = f"""import os, sys, time
sys.path.insert(0, {str(SUPPORT)!r})
os.environ["NBGPU_STATE_DIR"] = os.path.abspath("state")
import pretend_gpus
gpus = pretend_gpus.install(pretend_gpus.several(3))
gpus[1].used = 9 * pretend_gpus.GIB
from nbgpu.ui.controls.control_panel import _Controls
panel = _Controls("autoencoder", cluster=None)
picker = panel._devices.gpus
picker"""
BELOW = "<br>".join(["far below"] * 200)
SCROLLED = f"from IPython.display import HTML\nHTML({BELOW!r})"
BUSY = "for load in (13, 23, 33, 43, 53, 63):\n    gpus[0].load = load\n    time.sleep(1)"


def num_readings(notebook: Notebook) -> int:
    return int(notebook.in_kernel("print(picker.num_readings)"))


def chosen(notebook: Notebook) -> list[int]:
    """The numbers of the GPUs that a cluster would get."""
    code = "import json; print(json.dumps([int(uuid[4:12], 16) for uuid in picker.value]))"
    numbers: list[int] = json.loads(notebook.in_kernel(code))
    return numbers


def wait_for_choice(notebook: Notebook, expected: list[int]) -> None:
    give_up_s = time.monotonic() + 300
    while (found := chosen(notebook)) != expected:
        assert time.monotonic() < give_up_s, found
        time.sleep(0.1)


def wait_until_still(notebook: Notebook) -> int:
    """Wait until no reading is made for three seconds; their number."""
    give_up_s = time.monotonic() + 300
    while True:
        before = num_readings(notebook)
        time.sleep(3)
        if num_readings(notebook) == before:
            return before
        assert time.monotonic() < give_up_s, "the kernel goes on reading"


def box(page: Page, index: int) -> Locator:
    return page.get_by_role("checkbox", name=f"GPU {index} NVIDIA H100 80GB HBM3")


def card(page: Page, title: str) -> Locator:
    return page.get_by_role("group", name=title, exact=True)


@pytest.mark.timeout(900)
def test_the_cards_are_live_in_sight_and_used_by_the_keyboard(lab: Lab, page: Page) -> None:
    page.set_viewport_size({"width": 900, "height": 1000})
    lab.write_notebook("cards.ipynb", [START, SCROLLED, BUSY])
    notebook = Notebook(page, lab, "cards.ipynb")
    notebook.open()
    notebook.run_cell(0)
    notebook.wait_until_idle()

    # Where others use the machine, the default is one free GPU. A busy one says why in a sentence that a
    # screen reader has, too.
    expect(box(page, 0)).to_be_checked()
    expect(box(page, 1)).not_to_be_checked()
    expect(box(page, 2)).not_to_be_checked()
    box(page, 2).focus()
    page.keyboard.press("Space")
    why = "In use, with 9.0 GiB, by processes that the driver does not name."
    expect(card(page, "GPU 1")).to_contain_text(why)
    expect(box(page, 1)).to_have_accessible_description(re.compile(re.escape(f"in use {why}")))
    wait_for_choice(notebook, [0, 2])
    expect(page.get_by_role("group", name="Devices", exact=True)).to_be_visible()

    # Live, also while a cell runs.
    notebook.run_cell(2)
    expect(card(page, "GPU 0")).to_contain_text(re.compile(r"[1-5]3 % busy"))
    notebook.wait_until_idle()
    expect(card(page, "CPU")).to_contain_text("% busy")
    notebook.in_kernel("gpus[0].load = 37; gpus[0].used = int(0.7 * pretend_gpus.GIB)")
    expect(card(page, "GPU 0")).to_contain_text("37 % busy")
    expect(card(page, "GPU 0")).to_contain_text("0.7 of 80.0 GiB")

    # With the keyboard alone; the numbers that change do not take it away.
    box(page, 0).focus()
    page.keyboard.press("Space")
    wait_for_choice(notebook, [2])
    page.keyboard.press("Tab")
    expect(box(page, 1)).to_be_focused()
    before = num_readings(notebook)
    while num_readings(notebook) < before + 2:
        time.sleep(0.2)
    expect(box(page, 1)).to_be_focused()
    page.keyboard.press("Space")
    wait_for_choice(notebook, [1, 2])
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="none (CPU)")).to_be_focused()
    page.keyboard.press("Enter")
    wait_for_choice(notebook, [])
    expect(page.locator(".nbgpu-cards-summary")).to_have_text("No GPU is chosen: the ranks run on the CPU.")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    wait_for_choice(notebook, [0, 2])
    assert notebook.in_kernel("print(panel._devices.values({})['gpus'].count('GPU-'))") == "2\n"

    # A GPU that is lost, and one that goes.
    notebook.in_kernel("gpus[2].is_lost = True; gone = gpus.pop(1)")
    expect(card(page, "GPU 1")).to_contain_text("The driver cannot read it: GPU is lost.")
    expect(page.get_by_role("checkbox")).to_have_count(2)
    expect(page.get_by_role("checkbox").last).to_be_disabled()
    wait_for_choice(notebook, [0])
    screenshot(page, "cards")

    # Nothing is cut off at 900 pixels, nor at 200 % zoom, nor where eight GPUs share the page.
    for width, is_compact in ((900, False), (640, False), (640, True), (900, True)):
        if is_compact:
            notebook.in_kernel("gpus[:] = pretend_gpus.several(8); gpus[3].used = 9 * pretend_gpus.GIB")
            notebook.in_kernel("pretend_gpus.install(gpus)")
            expect(page.locator(".nbgpu-picker .nbgpu-card")).to_have_count(9, timeout=240_000)
            caption = page.locator(".nbgpu-picker .nbgpu-cards-caption")
            expect(caption).to_have_text("8 GPUs: NVIDIA H100 80GB HBM3, NVLink to all others")
        page.set_viewport_size({"width": width, "height": 1000})
        overflow = page.locator(".nbgpu-picker").evaluate(
            """root => [...root.querySelectorAll('*')].filter(
                each => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline'
            ).map(each => each.className)"""
        )
        assert overflow == [], width
    screenshot(page, "cards-compact")
    last = page.locator(".nbgpu-picker").bounding_box()
    assert last is not None
    assert last["height"] < 700

    # Out of sight nothing is read, and the driver is let go; back in sight it goes on.
    notebook.run_cell(1)
    notebook.wait_until_idle()
    page.evaluate("() => document.querySelectorAll('.jp-CodeCell')[2].scrollIntoView()")
    still = wait_until_still(notebook)
    assert notebook.in_kernel("print(picker._reader._cards._gpus._monitor._has_driver)") == "False\n"
    page.evaluate("() => document.querySelectorAll('.jp-CodeCell')[0].scrollIntoView()")
    give_up_s = time.monotonic() + 300
    while num_readings(notebook) < still + 3:
        assert time.monotonic() < give_up_s
        time.sleep(0.2)
