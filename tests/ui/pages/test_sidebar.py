"""nbgpu in JupyterLab itself: the sidebar, the status bar, the commands, and the marked cells."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from conftest import SUPPORT
from lab import Lab, Notebook, jupyter_lab, screenshot
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser

PRETEND = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import pretend_gpus
pretend_gpus.install(pretend_gpus.varied(4))
"""
"""Only the server has these GPUs; the kernel has two CPU ranks."""
TRAIN = (
    "run = nbgpu.current().train('autoencoder', data='phantoms', patch_size=16, num_phantoms=16, "
    "steps=50_000, threads=1, runs_dir='runs')"
)
NAMED = "%%distributed --ranks 1\nimport math\nfor i in range(2):\n    text = 'a word'  # a comment"
PATIENCE_MS = 240_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with jupyter_lab(tmp_path_factory.mktemp("lab"), PRETEND) as started:
        yield started


def sidebar(page: Page) -> Locator:
    return page.locator("#nbgpu-sidebar")


def from_the_palette(page: Page, typed: str, label: str) -> None:
    page.keyboard.press("Control+Shift+C")
    page.locator(".lm-CommandPalette-input").fill(typed)
    page.locator(".lm-CommandPalette-item:not(.lm-mod-disabled)", has_text=label).click()


def editor_of(page: Page, cell: int) -> Locator:
    return page.locator(".jp-CodeCell").nth(cell).locator(".cm-editor")


def colour_of(page: Page, cell: int, word: str) -> str:
    """The colour in which a word of a cell stands."""
    found: str = page.evaluate(
        """([cell, word]) => {
            const lines = document.querySelectorAll('.jp-CodeCell')[cell].querySelector('.cm-content');
            const walker = document.createTreeWalker(lines, NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
                const node = walker.currentNode;
                if (node.textContent.includes(word)) return getComputedStyle(node.parentElement).color;
            }
        }""",
        [cell, word],
    )
    return found


def test_a_cluster_is_started_watched_and_stopped_without_a_typed_line(lab: Lab, page: Page) -> None:
    lab.write_notebook("train.ipynb", ["", "import nbgpu\n" + TRAIN])
    notebook = Notebook(page, lab, "train.ipynb")
    notebook.open()
    status = page.locator(".nbgpu-lab-status")
    expect(status).not_to_be_visible()

    from_the_palette(page, "devices and clusters", "Show Devices and Clusters")
    expect(sidebar(page)).to_contain_text("You have no cluster on this host.")
    expect(sidebar(page).locator(".nbgpu-card")).to_have_count(5)
    expect(sidebar(page).locator(".nbgpu-card").nth(1)).to_contain_text("97 % busy")

    from_the_palette(page, "start a cluster", "Start a Cluster in This Notebook")
    cluster = sidebar(page).locator(".nbgpu-lab-cluster")
    expect(cluster).to_contain_text("train.ipynb (this notebook)", timeout=PATIENCE_MS)
    expect(cluster.locator("li")).to_have_count(2, timeout=PATIENCE_MS)
    expect(status).to_have_text("2 ranks, idle", timeout=PATIENCE_MS)
    notebook.wait_until_idle()
    assert notebook.in_kernel("import nbgpu; print(nbgpu.current().world_size)") == "2\n"

    notebook.run_cell(1)
    expect(cluster.locator("progress")).to_be_visible(timeout=PATIENCE_MS)
    expect(cluster).to_contain_text("autoencoder: training", timeout=PATIENCE_MS)
    expect(cluster).to_contain_text("left", timeout=PATIENCE_MS)
    expect(status).to_contain_text("2 ranks, running, step")
    screenshot(page, "sidebar-light")
    notebook.set_theme("JupyterLab Dark")
    page.set_viewport_size({"width": 900, "height": 800})
    screenshot(page, "sidebar-dark")
    page.set_viewport_size({"width": 1280, "height": 1000})

    # With the sidebar closed the status bar still says how far it is, and opens it.
    page.evaluate("() => void jupyterapp.commands.execute('application:toggle-left-area')")
    expect(sidebar(page)).not_to_be_visible()
    status.click()
    expect(sidebar(page)).to_be_visible()
    cluster.get_by_role("button", name="Pause").click()
    expect(cluster).to_contain_text("autoencoder: paused", timeout=PATIENCE_MS)
    cluster.get_by_role("button", name="Resume").click()
    expect(cluster).to_contain_text("autoencoder: training", timeout=PATIENCE_MS)
    cluster.get_by_role("button", name="Stop").click()
    expect(cluster).to_contain_text("autoencoder: stopped", timeout=PATIENCE_MS)
    report = cluster.get_by_role("button", name="Report")
    expect(report).to_be_visible(timeout=PATIENCE_MS)
    with page.context.expect_page() as opened:
        report.click()
    # The report draws its charts in the sandbox that the server puts it in.
    expect(opened.value.locator("#charts .main-svg").first).to_be_visible(timeout=PATIENCE_MS)
    opened.value.close()
    assert notebook.in_kernel("print(run.status)") == "stopped\n"

    cluster.get_by_role("button", name="End …").click()
    page.locator(".jp-Dialog").get_by_role("button", name="End it").click()
    expect(sidebar(page)).to_contain_text("You have no cluster on this host.", timeout=PATIENCE_MS)
    expect(status).not_to_be_visible()


def test_cells_for_the_ranks_are_marked_and_highlighted_as_python(lab: Lab, page: Page) -> None:
    plain = NAMED.partition("\n")[2]
    lab.write_notebook("cells.ipynb", [plain, NAMED, "x = 1\n%%distributed"])
    notebook = Notebook(page, lab, "cells.ipynb")
    notebook.open()
    named = editor_of(page, 1)
    expect(page.locator(".cm-editor.nbgpu-distributed")).to_have_count(1)
    assert named.get_attribute("data-nbgpu-ranks") == "rank 1"
    edge = named.evaluate("e => getComputedStyle(e).backgroundImage")
    assert "rgb(166, 81, 10)" in edge, "rank 1's colour"
    for word in ("import", "for", "range", "a word", "a comment"):
        assert colour_of(page, 1, word) == colour_of(page, 0, word), word
    assert colour_of(page, 1, "distributed") != colour_of(page, 0, "math")

    # The mark follows what is typed.
    named.locator(".cm-line").first.click()
    page.keyboard.press("End")
    page.keyboard.type(",0")
    expect(named).to_have_attribute("data-nbgpu-ranks", "ranks 1, 0")
    page.keyboard.press("Home")
    page.keyboard.type("#")
    expect(page.locator(".cm-editor.nbgpu-distributed")).to_have_count(0)

    from_the_palette(page, "insert a distributed", "Insert a Distributed Cell")
    expect(page.locator(".cm-editor.nbgpu-distributed")).to_have_count(1)
    expect(editor_of(page, 2).locator(".cm-content")).to_be_focused()
    page.keyboard.type("print(rank)")
    sources = page.evaluate(
        "() => jupyterapp.shell.currentWidget.content.widgets.map(c => c.model.sharedModel.getSource())"
    )
    assert sources[2] == "%%distributed\nprint(rank)"


@pytest.mark.long
def test_a_kept_cluster_goes_on_in_the_current_notebook(lab: Lab, page: Page) -> None:
    lab.write_notebook(
        "first.ipynb",
        ["%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2 --keep", "%%distributed\nkept = 7 * rank"],
    )
    notebook = Notebook(page, lab, "first.ipynb")
    notebook.open()
    for cell in (0, 1):
        notebook.run_cell(cell)
        notebook.wait_until_idle()
    lab.shut_kernels_down()
    lab.write_notebook("second.ipynb", [""])
    second = Notebook(page, lab, "second.ipynb")
    second.open()
    page.evaluate("() => void jupyterapp.commands.execute('nbgpu:show-sidebar')")
    cluster = sidebar(page).locator(".nbgpu-lab-cluster")
    expect(cluster).to_contain_text("kept, without a notebook")
    try:
        cluster.get_by_role("button", name="Attach").click()
        expect(cluster).to_contain_text("second.ipynb (this notebook)", timeout=PATIENCE_MS)
        second.wait_until_idle()
        said = second.in_kernel("import nbgpu; print(nbgpu.current().pull('kept', ranks=[1]))")
        assert "7" in said
    finally:
        second.in_kernel("import nbgpu; nbgpu.current().stop()")
    expect(sidebar(page)).to_contain_text("You have no cluster on this host.")


def test_a_server_without_the_extension_is_said_once(lab: Lab, page: Page) -> None:
    """A page may be of another version than its server."""
    page.route("**/nbgpu/overview*", lambda route: route.fulfill(status=404, body="{}"))
    lab.write_notebook("alone.ipynb", ["1 + 1"])
    notebook = Notebook(page, lab, "alone.ipynb")
    notebook.open()
    page.evaluate("() => void jupyterapp.commands.execute('nbgpu:show-sidebar')")
    expect(sidebar(page).get_by_role("alert")).to_contain_text("does not have nbgpu's extension")
    notebook.run_cell(0)
    notebook.wait_until_idle()
    assert json.dumps(notebook.save()).count('"2"') == 1
