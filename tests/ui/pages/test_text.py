"""The text of a cell on a page: live, with a choice of the rank, and what of it stays."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import chromium
from jupyter_client.blocking import BlockingKernelClient
from kernel import Kernel
from kernel import kernel as start_kernel
from lab import Notebook, browser_page, jupyter_lab, screenshot
from nbconvert import HTMLExporter
from playwright.sync_api import Page, expect

from nbgpu.client.cells.merging import Block
from nbgpu.ui.cell.text_html import bundle
from widgets import new_subshell, say

BOUND_S = 30
WIDGET = "application/vnd.jupyter.widget-view+json"
START = "%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2"
SLOW = "import time\nfor i in range({n}): print('line', i, 'of', rank, flush=True); time.sleep({pause_s})"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with start_kernel() as started:
        assert started.run(START).status == "ok"
        # The first widget of a kernel takes half a second of imports.
        started.run("import nbgpu.ui.cell.live_text")
        yield started
        started.run("%nbgpu stop")


def messages(client: BlockingKernelClient, code: str) -> Iterator[dict[str, Any]]:
    """What comes on iopub of a cell that a page has sent, as it comes, to the cell's end."""
    cell_id = client.execute(code, allow_stdin=True)
    give_up_s = time.monotonic() + BOUND_S
    while time.monotonic() < give_up_s:
        message = client.get_iopub_msg(timeout=BOUND_S)
        is_idle = message["content"].get("execution_state") == "idle"
        if is_idle and message["parent_header"].get("msg_id") == cell_id:
            client.get_shell_msg(timeout=10)
            return
        yield message
    raise AssertionError(f"the cell did not end within {BOUND_S} s: {code}")


def text_widget(message: dict[str, Any]) -> str | None:
    """The id of the widget that a message opens, if it is one of text."""
    if message["msg_type"] == "comm_open":
        state = message["content"]["data"]["state"]
        if str(state.get("slot", "")).startswith("nbgpu-"):
            return str(message["content"]["comm_id"])
    return None


def told_to_page(message: dict[str, Any], comm_id: str) -> dict[str, Any]:
    if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == comm_id:
        content: dict[str, Any] = message["content"]["data"].get("content", {})
        return content
    return {}


@pytest.mark.subshells
def test_a_page_gets_what_is_new_and_the_notebook_keeps_all(notebook: Kernel) -> None:
    subshell_id = new_subshell(notebook.client)
    num_bytes: dict[int, int] = {}
    for num_lines in (100, 400):
        comm_id, came, kinds = "", [], []
        kept: dict[str, Any] = {}
        started_s = time.monotonic()
        for message in messages(notebook.client, f"%%distributed\n{SLOW.format(n=num_lines, pause_s=0.01)}"):
            kinds.append(message["msg_type"])
            if opened := text_widget(message):
                comm_id = opened
                say(notebook.client, comm_id, subshell_id, {"type": "ready"})
                say(notebook.client, comm_id, subshell_id, {"type": "chosen", "value": "1"})
            if told := told_to_page(message, comm_id):
                came.append(told)
            if message["msg_type"] == "update_display_data" and "text/html" in message["content"]["data"]:
                kept = message["content"]["data"]
            if told.get("type") == "end":
                say(notebook.client, comm_id, subshell_id, {"type": "stored"})
        took_s = time.monotonic() - started_s
        assert "stream" not in kinds
        assert came[0]["type"] == "snapshot"
        assert len(came) <= 10 * took_s + 3
        for rank in (0, 1):
            lines = [line for line in kept["text/plain"].splitlines() if line.startswith(f"[{rank}]")]
            assert lines == [f"[{rank}] line {i} of {rank}" for i in range(num_lines)]
        assert re.search('value="1"[^>]* checked>', kept["text/html"])
        num_bytes[num_lines] = sum(len(str(told)) for told in came)
    assert num_bytes[400] / num_bytes[100] < 6, num_bytes


@pytest.mark.subshells
def test_a_page_that_knows_no_widgets_gets_the_text_in_streams(notebook: Kernel) -> None:
    text, opened, closed, displays = "", [], [], []
    for message in messages(notebook.client, f"%%distributed\n{SLOW.format(n=32, pause_s=0.2)}"):
        content = message["content"]
        opened += [text_widget(message)] if text_widget(message) else []
        if message["msg_type"] == "comm_close":
            closed.append(content["comm_id"])
        elif message["msg_type"] == "stream":
            text += content["text"]
        elif message["msg_type"] in ("display_data", "update_display_data"):
            displays.append(content["data"])
    assert len(opened) == 1
    assert set(opened) <= set(closed)
    assert {} in displays, "the widget's place is empty"
    for rank in (0, 1):
        assert [f"line {i} of {rank}" in text for i in range(32)] == [True] * 32


@pytest.mark.subshells
def test_a_cell_that_ends_before_the_page_is_ready_leaves_no_widget(notebook: Kernel) -> None:
    displays, opened, closed = [], [], []
    # Longer than it takes for the widget to be opened, and far shorter than a page is waited for.
    for message in messages(notebook.client, f"%%distributed\n{SLOW.format(n=10, pause_s=0.08)}\n1/0"):
        opened += [text_widget(message)] if text_widget(message) else []
        if message["msg_type"] == "comm_close":
            closed.append(message["content"]["comm_id"])
        elif message["msg_type"] in ("display_data", "update_display_data"):
            displays.append(message["content"]["data"])
    assert len(opened) == 1
    assert set(opened) <= set(closed)
    # The text comes in the widget's place, and what a busy rank says after that behind it.
    text = "".join(data.get("text/plain", "") for data in displays[displays.index({}) + 1 :])
    assert [f"line {i} of {rank}" in text for rank in (0, 1) for i in range(10)] == [True] * 20


@pytest.mark.subshells
def test_a_display_that_changes_leaves_the_text_in_one_piece(notebook: Kernel) -> None:
    code = (
        "import time\nfrom IPython.display import HTML, display\nshown = display(HTML('0'), display_id=True)\n"
        "for i in range(1, 6):\n    print('step', i, 'of', rank); shown.update(HTML(str(i))); time.sleep(0.2)"
    )
    came = list(messages(notebook.client, f"%%distributed\n{code}"))
    assert len([m for m in came if text_widget(m)]) == 1
    changes = [m["content"] for m in came if m["msg_type"] == "update_display_data"]
    last = {c["transient"]["display_id"]: c["data"].get("text/html") for c in changes if c["data"]}
    assert list(last.values()) == ["5", "5"]


@pytest.mark.parametrize(
    "code", ["print('alike')", "print(rank)", "rank", "pass", "for i in range(99): print(i)"]
)
def test_a_short_cell_with_little_to_choose_is_a_plain_stream(notebook: Kernel, code: str) -> None:
    kinds = {m["msg_type"] for m in messages(notebook.client, f"%%distributed\n{code}")}
    assert not kinds & {"comm_open", "display_data"}


LIVE = """%%distributed
import itertools, os, sys, time
print('begin')
for i in itertools.count():
    if os.path.exists({until!r}): break
    print('step', i)
    print(f'  loss of rank {{rank}}: {{1 / (i + 1 + rank):.4f}}')
    if i == 3: print('\\x1b[31mred\\x1b[0m <b>not bold</b>', rank)
    if i == 5 and rank: print('a warning', file=sys.stderr)
    time.sleep(0.25)
print('end')"""
LONG = "%%distributed\nfor i in range(10_000): print('line', i, 'of', rank)"
BARS = """%%distributed
from tqdm.auto import tqdm
for i in tqdm(range(25), desc=f'bar {rank}'): time.sleep(0.1)"""


def said(page: Page, cell: int) -> list[str]:
    """The lines that one sees under a cell."""
    text = page.locator(".jp-CodeCell").nth(cell).locator(".nbgpu-said:visible pre")
    return "\n".join(text.all_inner_texts()).splitlines()


@pytest.mark.subshells
@pytest.mark.browser
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_text_in_a_page(tmp_path: Path) -> None:
    path = chromium()
    assert path is not None, "the marker 'browser' skips where there is none"
    complaints: list[str] = []
    until = tmp_path / "until"
    with jupyter_lab(tmp_path) as lab:
        lab.write_notebook("text.ipynb", [START, LIVE.format(until=str(until)), BARS, LONG, "%nbgpu stop"])
        with browser_page(path, tmp_path) as page:
            page.on("console", lambda m: complaints.append(m.text) if "nbgpu" in m.text else None)
            notebook = Notebook(page, lab, "text.ipynb")
            notebook.open()
            notebook.run_cell(0)
            notebook.wait_until_idle()
            notebook.run_cell(1)

            # Live, with a choice of the rank that works with the keyboard.
            expect(page.get_by_text("loss of rank 1: 0.3333")).to_be_visible()
            assert "  loss of rank 0: 0.5000" in said(page, 1)
            page.get_by_role("radio", name="all ranks").focus()
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            expect(page.get_by_role("radio", name="rank 1")).to_be_checked()
            seen = said(page, 1)
            assert "begin" in seen
            assert "  loss of rank 1: 0.3333" in seen
            assert not any("rank 0" in line for line in seen)
            expect(page.get_by_text("red <b>not bold</b> 1")).to_be_visible()
            screenshot(page, "text-light")

            # A page that is reloaded in mid-cell has all of it again, and the choice.
            page.wait_for_timeout(1500)
            page.reload()
            expect(page.get_by_role("radio", name="rank 1")).to_be_checked(timeout=BOUND_S * 1000)
            expect(page.get_by_text("Python 3 (ipykernel) | Busy")).to_be_visible()
            assert said(page, 1)[:2] == ["begin", "step 0"]
            page.get_by_role("radio", name="all ranks").check()
            expect(page.get_by_text("loss of rank 0: 1.0000")).to_be_visible()
            notebook.set_theme("JupyterLab Dark")
            assert page.locator(".jp-RenderedHTML .nbgpu-said").count() == 0
            until.touch()
            expect(page.locator(".jp-RenderedHTML .nbgpu-said").first).to_be_visible(timeout=BOUND_S * 1000)
            assert said(page, 1)[-1] == "end"
            screenshot(page, "text-dark")

            notebook.run_cell(2)
            expect(page.locator(".nbgpu-rows pre", has_text="bar 1:")).to_be_visible()
            notebook.wait_until_idle()
            assert [line[:11] for line in said(page, 2)] == ["bar 0: 100%", "bar 1: 100%"]

            # JupyterLab goes on painting while 20,000 lines come.
            notebook.run_cell(3)
            longest_s = 0.0
            while page.locator(".jp-CodeCell").nth(3).locator(".jp-RenderedHTML .nbgpu-said").count() == 0:
                asked_s = time.monotonic()
                page.evaluate("() => new Promise(painted => requestAnimationFrame(painted))")
                longest_s = max(longest_s, time.monotonic() - asked_s)
            assert longest_s < BOUND_S
            print(f"longest time without a frame: {longest_s:.2f} s")
            notebook.run_cell(4)
            notebook.wait_until_idle()
            document = notebook.save()
        lab.shut_kernels_down()

    live, bars, long = (cell.outputs for cell in document.cells[1:4])
    (text,) = [o.data for o in live if o.data]
    assert WIDGET not in text
    # Which of two ranks said its line first is for the machine to decide.
    begin = r"\[0-1\] begin\n\[0-1\] step 0\n\[([01])\]   loss of rank \1: [\d.]+\n\[(?!\1)[01]\]   loss"
    assert re.match(begin, text["text/plain"]), text["text/plain"]
    assert text["text/plain"].endswith("[0-1] end")
    assert "[1] a warning" in text["text/plain"]
    assert all(WIDGET not in o.get("data", {}) for o in [*bars, *long])
    assert sum(len(o.data["text/plain"].splitlines()) for o in long if o.data) == 20_000
    assert not complaints, complaints


@pytest.mark.browser
def test_the_choice_works_in_what_nbconvert_writes(tmp_path: Path) -> None:
    path = chromium()
    assert path is not None, "the marker 'browser' skips where there is none"
    blocks = [
        Block((0, 1), "stdout", ["same"]),
        Block((0,), "stdout", ["zero"]),
        Block((1,), "stderr", ["one"]),
    ]
    kept = nbformat.v4.new_output("display_data", data=bundle([0, 1], blocks))
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%%distributed", outputs=[kept])])
    written = tmp_path / "written.html"
    written.write_text(HTMLExporter().from_notebook_node(document)[0])
    with browser_page(path, tmp_path) as page:
        page.goto(written.as_uri(), wait_until="commit")
        lines = page.locator(".nbgpu-said:visible pre")
        expect(lines).to_have_text(["same", "zero", "one"])
        page.get_by_role("radio", name="rank 1").check()
        expect(lines).to_have_text(["same", "one"])
