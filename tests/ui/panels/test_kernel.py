"""The panel in a real kernel: its buttons while a cell blocks, and its absence where nobody looks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import SUPPORT
from jupyter_client.blocking import BlockingKernelClient
from kernel import kernel as start_kernel
from nbclient import NotebookClient

from widgets import new_subshell, run_cell, say, wait_for, widget_id

WHILE_THE_CELL_RUNS_S = 6
"""What waited for the blocking cell would take twice as long."""


def start_code(folder: Path, steps: int = 100_000) -> str:
    return f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
from recorded import RecordedRun
from nbgpu.ui.run.panel import show
run = RecordedRun(Path({str(folder)!r}), steps={steps}, step_s=0.01)
show(run)
"""


@pytest.fixture
def kernel() -> Iterator[BlockingKernelClient]:
    with start_kernel() as started:
        yield started.client
        started.manager.interrupt_kernel()


@pytest.mark.subshells
def test_the_panel_answers_while_a_cell_blocks(kernel: BlockingKernelClient, tmp_path: Path) -> None:
    comm_id = widget_id(run_cell(kernel, start_code(tmp_path)))
    subshell_id = new_subshell(kernel)
    kernel.execute("import time; time.sleep(12)")
    time.sleep(0.5)

    say(kernel, comm_id, subshell_id, {"type": "ready", "plotly": False})
    snapshot = wait_for(
        kernel, comm_id, lambda c: c.get("type") == "snapshot", timeout_s=WHILE_THE_CELL_RUNS_S
    )
    assert [rank["label"] for rank in snapshot["ranks"]] == ["GPU 0 NVIDIA H200", "GPU 1 NVIDIA H200"]
    plotly = wait_for(kernel, comm_id, lambda c: c.get("type") == "plotly", timeout_s=WHILE_THE_CELL_RUNS_S)
    assert bytes(plotly["buffers"][0][:2]) == b"\x1f\x8b"

    say(kernel, comm_id, subshell_id, {"type": "command", "command": "pause"})
    wait_for(
        kernel,
        comm_id,
        lambda c: c.get("status", {}).get("state") == "paused",
        timeout_s=WHILE_THE_CELL_RUNS_S,
    )
    say(kernel, comm_id, subshell_id, {"type": "command", "command": "stop"})
    wait_for(
        kernel,
        comm_id,
        lambda c: c.get("status", {}).get("state") == "stopped",
        timeout_s=WHILE_THE_CELL_RUNS_S,
    )
    wait_for(kernel, comm_id, lambda c: c.get("type") == "end", timeout_s=WHILE_THE_CELL_RUNS_S)


@pytest.mark.subshells
def test_the_kernel_stays_busy_while_a_cell_runs(kernel: BlockingKernelClient, tmp_path: Path) -> None:
    comm_id = widget_id(run_cell(kernel, start_code(tmp_path)))
    subshell_id = new_subshell(kernel)
    cell_id = kernel.execute("import time; time.sleep(3)")
    time.sleep(0.5)
    for _ in range(3):
        say(kernel, comm_id, subshell_id, {"type": "ready", "plotly": True})
    states: list[tuple[str, str]] = []
    while ("idle", cell_id) not in states:
        message = kernel.get_iopub_msg(timeout=30)
        if message["msg_type"] == "status":
            request = message["parent_header"]
            states.append((message["content"]["execution_state"], request["msg_id"]))
    # From the cell's request to its end, 'idle' is the last word of no other.
    during = [state for state, _ in states[states.index(("busy", cell_id)) : -1]]
    assert during.count("idle") == 3
    assert all(after == "busy" for state, after in pairwise(during) if state == "idle")
    assert during[-1] == "busy"
    # Between cells each answer ends 'idle'.
    for _ in range(2):
        say(kernel, comm_id, subshell_id, {"type": "ready", "plotly": True})
    for state in ("busy", "idle") * 2:
        while (message := kernel.get_iopub_msg(timeout=30))["msg_type"] != "status":
            pass
        assert message["content"]["execution_state"] == state


@pytest.mark.subshells
def test_the_buttons_of_the_controls_answer_while_a_cell_blocks(
    kernel: BlockingKernelClient,
) -> None:
    came = run_cell(kernel, "import nbgpu\nnbgpu.controls('autoencoder')")
    opened = [m["content"] for m in came if m["msg_type"] == "comm_open"]
    states = {o["comm_id"]: o["data"]["state"] for o in opened}
    (start_id,) = [i for i, s in states.items() if s.get("description") == "Start"]
    (size_id,) = [i for i, s in states.items() if s.get("label") == "Patch size"]
    subshell_id = new_subshell(kernel)
    kernel.execute("import time; time.sleep(12)")
    time.sleep(0.5)

    started_s = time.monotonic()
    change = {"comm_id": size_id, "data": {"method": "update", "state": {"value": "30"}}}
    message = kernel.session.msg("comm_msg", change)
    message["header"]["subshell_id"] = subshell_id
    kernel.shell_channel.send(message)
    say(kernel, start_id, subshell_id, {"event": "click"})
    while True:
        told = kernel.get_iopub_msg(timeout=5)
        if "Patch size: 30 is not valid" in json.dumps(told["content"]):
            break
    assert time.monotonic() - started_s < WHILE_THE_CELL_RUNS_S


WAITING_WIDGETS = """
import ipywidgets as w
from nbgpu.ui.controls.control_panel import _Controls
panel = _Controls("autoencoder", cluster=None)
def inputs(widget):
    yield widget
    for child in getattr(widget, "children", ()): yield from inputs(child)
shown = [each for each in inputs(panel.box) if not isinstance(each, (w.Box, w.HTML))]
waiting = [type(each).__name__ for each in shown if each.comm._reply_subshell_for({}, "subshell") != "subshell"]
print(len(shown), waiting)
"""


@pytest.mark.subshells
def test_all_of_the_controls_are_answered_on_one_thread(kernel: BlockingKernelClient) -> None:
    # A button that is answered at once would read a field whose new value still waits for the cell's end.
    came = run_cell(kernel, WAITING_WIDGETS)
    (text,) = [m["content"]["text"] for m in came if m["msg_type"] == "stream"]
    number, waiting = text.split(maxsplit=1)
    assert int(number) > 50
    assert waiting == "[]\n"


@pytest.mark.subshells
def test_a_page_that_comes_late_gets_the_whole_history(kernel: BlockingKernelClient, tmp_path: Path) -> None:
    comm_id = widget_id(run_cell(kernel, start_code(tmp_path)))
    time.sleep(1.5)
    subshell_id = new_subshell(kernel)
    for _ in range(2):
        say(kernel, comm_id, subshell_id, {"type": "ready", "plotly": True})
        snapshot = wait_for(
            kernel, comm_id, lambda c: c.get("type") == "snapshot", timeout_s=WHILE_THE_CELL_RUNS_S
        )
        assert len(snapshot["buffers"][2]) // 4 > 100


def test_a_kernel_that_cannot_be_asked_sends_all_unasked(
    kernel: BlockingKernelClient, tmp_path: Path
) -> None:
    code = "import nbgpu.ui.run.panel\nnbgpu.ui.run.panel.has_subshells = lambda: False\n" + start_code(
        tmp_path
    )
    came = run_cell(kernel, code)
    comm_id = widget_id(came)
    (opened,) = [m for m in came if m["msg_type"] == "comm_open" and m["content"]["comm_id"] == comm_id]
    places = [opened["content"]["data"]["buffer_paths"], [bytes(b[:2]) for b in opened["buffers"]]]
    assert places == [[["plotly_gz"]], [b"\x1f\x8b"]]
    wait_for(kernel, comm_id, lambda c: c.get("type") == "snapshot", timeout_s=WHILE_THE_CELL_RUNS_S)


@pytest.mark.long
def test_with_nobody_in_front_there_is_no_widget_and_the_curves_stay(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    cells = [start_code(tmp_path, steps=100), "run.wait()", "import nbgpu\nnbgpu.controls('autoencoder')"]
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    NotebookClient(notebook, timeout=180).execute()
    assert "widgets" not in notebook.metadata
    head, curves = notebook.cells[0].outputs
    assert set(head.data) == {"text/html", "text/plain"}
    assert head.data["text/plain"].startswith("autoencoder: finished, step 100 of 100")
    assert "trilinear" in head.data["text/html"]
    assert set(curves.data) == {"application/vnd.plotly.v1+json", "text/html", "text/plain"}
    assert curves.data["text/plain"].startswith("autoencoder: finished, step 100 of 100")
    (controls,) = notebook.cells[2].outputs
    # A table of the settings in place of the fields.
    assert set(controls.data) == {"text/html", "text/plain"}
    assert "<table" in controls.data["text/html"]
    assert "batch_size=2" in controls.data["text/plain"]
    assert 'run = nbgpu.current().train("autoencoder")' in controls.data["text/plain"]


@pytest.mark.long
def test_with_nobody_in_front_a_line_tells_how_far_the_run_is(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    often = "import nbgpu.ui.run.panel\nnbgpu.ui.run.panel.PICTURE_PERIOD_S = 1\n"
    cells = [often + start_code(tmp_path), "import time; time.sleep(15)", "run.stop(); run.wait()"]
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    client = NotebookClient(notebook, timeout=180)
    lines, pictures = [], []

    def look(cell: Any, cell_index: int, execute_reply: Any) -> None:
        head, curves = notebook.cells[0].outputs
        lines.append(head.data["text/plain"])
        pictures.append(curves.data.get("text/html", ""))

    client.on_cell_executed = look
    client.execute()
    # A picture stands in the place of the curves before the run is over.
    assert pictures[1]
    assert pictures[2] != pictures[1]
    assert lines[1].startswith("autoencoder: training, step ")
    assert lines[2].startswith("autoencoder: stopped")


@pytest.mark.long
def test_the_plan_stands_above_the_curves_of_a_run(tmp_path: Path) -> None:
    settings = {"data": "phantoms", "num_phantoms": 10, "patch_size": 8, "batch_size": 2, "steps": 2}
    cells = [
        "%load_ext nbgpu\nimport nbgpu\n%nbgpu start --gpus none --ranks 2",
        f"run = nbgpu.current().train('autoencoder', **{settings!r}, runs_dir={str(tmp_path)!r}, threads=1)\nrun.panel()",
        "run.wait()\nrun.wait();",
        "run.show_result()\n%nbgpu stop",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=270).execute()
    plan, head, curves, pictures = notebook.cells[1].outputs
    # At first nothing was known of the data.
    assert "8 volumes over 2 ranks: 4 on each" in plan.data["text/plain"]
    assert "steps: 2, of which an epoch has 2; epochs: 1" in plan.data["text/plain"]
    assert "<summary" in plan.data["text/html"]
    assert curves.data["text/plain"].startswith("autoencoder: finished, step 2 of 2")
    # Its name in this kernel: at the end of the run the cluster was there.
    assert "run = nbgpu.current().run" in head.data["text/html"]
    (folder,) = tmp_path.iterdir()
    assert f"/{folder.name}/report.html" in head.data["text/html"]
    # One line for each wait, as it was last, and no bar at the end.
    lines = [output.data for output in notebook.cells[2].outputs]
    assert [line["text/plain"].partition(", loss")[0] for line in lines] == [
        "autoencoder: finished, step 2 of 2"
    ] * 2
    assert not any("<progress" in line["text/html"] for line in lines)
    (result,) = [o.data for o in notebook.cells[3].outputs if "text/html" in o.get("data", {})]
    assert "trilinear" in result["text/plain"]
    assert "data:image/png;base64," in result["text/html"]
    assert pictures.data["text/plain"].startswith("step 2: original, reconstruction, absolute error")
