"""The Stop button under a cell: there while the cell runs, where somebody can press it, and then gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import chromium
from jupyter_client.blocking import BlockingKernelClient
from kernel import Kernel
from kernel import kernel as start_kernel
from lab import Notebook, browser_page, jupyter_lab
from rows import Measured, row

from widgets import new_subshell, say

BOUND_S = 30
START = "%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2"
WAITS = "%%distributed\nkept = 7 * rank\nif rank == 0: dist.barrier()"
CHECK = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nprint(int(total), kept)"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with start_kernel() as started:
        assert started.run(START).status == "ok"
        yield started
        started.run("%nbgpu stop")


def messages_until(client: BlockingKernelClient, wanted: str) -> list[dict[str, Any]]:
    """What came on iopub up to the first message of a type; 'idle' for the end of a cell."""
    came: list[dict[str, Any]] = []
    give_up_s = time.monotonic() + BOUND_S
    while time.monotonic() < give_up_s:
        came.append(client.get_iopub_msg(timeout=BOUND_S))
        is_idle = came[-1]["content"].get("execution_state") == "idle"
        if wanted == came[-1]["msg_type"] or (wanted == "idle" and is_idle):
            return came
    raise AssertionError(f"no {wanted} within {BOUND_S} s")


@pytest.mark.subshells
@row("Stop with the button under a cell", "as with the kernel's interrupt, and the button goes", bound_s=1)
def test_the_button_stops_the_cell_and_goes(notebook: Kernel, measured: Measured) -> None:
    client = notebook.client
    subshell_id = new_subshell(client)
    while client.iopub_channel.msg_ready():
        client.get_iopub_msg()
    cell_id = client.execute(WAITS, allow_stdin=True)
    came = messages_until(client, "display_data")
    (button_id,) = [
        m["content"]["comm_id"]
        for m in came
        if m["msg_type"] == "comm_open" and m["content"]["data"]["state"].get("description") == "Stop"
    ]
    slot = came[-1]["content"]["transient"]["display_id"]
    assert came[-1]["content"]["data"][WIDGET]["model_id"] == button_id

    measured.fault_now()
    say(client, button_id, subshell_id, {"event": "click"})
    ended: list[dict[str, Any]] = []
    while not ended or ended[-1]["parent_header"].get("msg_id") != cell_id:
        ended += messages_until(client, "idle")
    measured.ended()
    (error,) = [m["content"] for m in ended if m["msg_type"] == "error"]
    assert "the cell was stopped; the ranks keep their variables" in "".join(error["traceback"])
    replaced = [m["content"] for m in ended if m["msg_type"] == "update_display_data"]
    assert [r["data"] for r in replaced if r["transient"]["display_id"] == slot] == [{}]
    assert [m["content"]["comm_id"] for m in ended if m["msg_type"] == "comm_close"] == [button_id]
    assert notebook.run(CHECK).said(0, 1) == [["2 0"], ["2 7"]]


def test_where_nobody_can_press_it_there_is_none(notebook: Kernel) -> None:
    notebook.client.execute("%%distributed\nimport time; time.sleep(3)", allow_stdin=False)
    kinds = [m["msg_type"] for m in messages_until(notebook.client, "idle")]
    assert not {"comm_open", "display_data"} & set(kinds)


def test_a_short_cell_gets_none(notebook: Kernel) -> None:
    notebook.client.execute("%%distributed\n1", allow_stdin=True)
    kinds = [m["msg_type"] for m in messages_until(notebook.client, "idle")]
    assert not {"comm_open", "display_data"} & set(kinds)


@pytest.mark.subshells
@pytest.mark.browser
@pytest.mark.long
def test_the_button_in_a_page(tmp_path: Path) -> None:
    path = chromium()
    assert path is not None, "the marker 'browser' skips where there is none"
    with jupyter_lab(tmp_path) as lab:
        lab.write_notebook("stop.ipynb", [START, WAITS, CHECK, "%nbgpu stop"])
        with browser_page(path, tmp_path) as page:
            notebook = Notebook(page, lab, "stop.ipynb")
            notebook.open()
            notebook.run_cell(0)
            notebook.wait_until_idle()
            notebook.run_cell(1)
            button = page.get_by_role("button", name="Stop").and_(page.locator(".jupyter-button"))
            button.click()
            button.wait_for(state="detached")
            notebook.wait_until_idle()
            notebook.run_cell(2)
            notebook.wait_until_idle()
            notebook.run_cell(3)
            notebook.wait_until_idle()
            stopped, checked = notebook.save().cells[1:3]
        lab.shut_kernels_down()
    assert "the cell was stopped" in "".join(stopped.outputs[-1].traceback)
    assert all(WIDGET not in output.get("data", {}) for output in stopped.outputs)
    assert "2 7" in checked.outputs[0].text
