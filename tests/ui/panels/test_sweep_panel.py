"""The panel of a sweep in a real kernel: live in the page, answering while a cell blocks, and kept at the
end."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel import kernel as start_kernel

from widgets import new_subshell, run_cell, say, wait_for

HANG_S = 300

_START = """
import nbgpu
sweep = nbgpu.sweep("autoencoder", gpus="none", parallel=1, data="phantoms", patch_size=8, num_phantoms=8,
                    steps=4, val_every=2, threads=1, lr=[1e-3, 1e-2], runs_dir={folder!r})
sweep
"""


@pytest.mark.long
@pytest.mark.subshells
def test_the_panel_of_a_sweep_is_live_and_leaves_table_and_chart(tmp_path: Path) -> None:
    with start_kernel() as started:
        kernel = started.client
        came = run_cell(kernel, _START.format(folder=str(tmp_path)))
        button, panel = [m["content"] for m in came if m["msg_type"] == "display_data"]
        assert button["metadata"]["nbgpu"] == {"button": True}
        comm_id = panel["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
        slot = panel["metadata"]["nbgpu"]["slot"]
        subshell_id = new_subshell(kernel)
        waiting = kernel.execute("sweep.wait()")

        say(kernel, comm_id, subshell_id, {"type": "ready"})
        first = wait_for(kernel, comm_id, lambda c: c.get("type") == "snapshot", HANG_S)["html"]
        assert "0 of 2 trials finished" in first
        assert "<td>0.001</td>" in first
        drawn = wait_for(kernel, comm_id, lambda c: "<svg" in c.get("html", ""), HANG_S)["html"]
        assert "step" in drawn
        wait_for(kernel, comm_id, lambda c: c.get("type") == "end", HANG_S)
        say(kernel, comm_id, subshell_id, {"type": "bundle"})
        last = wait_for(kernel, comm_id, lambda c: c.get("type") == "bundle", HANG_S)
        assert last["metadata"]["nbgpu"] == {"slot": slot, "final": slot}
        assert "2 of 2 trials finished" in last["data"]["text/plain"]
        # An image, because JupyterLab takes SVG out of the outputs of others' notebooks.
        assert "data:image/svg+xml" in last["data"]["text/html"]
        assert "<svg" not in last["data"]["text/html"]
        while kernel.get_shell_msg(timeout=HANG_S)["parent_header"].get("msg_id") != waiting:
            pass
        # What waits for it shows one line, which stays as it was last.
        told = [m["content"] for m in run_cell(kernel, "sweep.wait();")]
        lines = [shown["data"]["text/plain"] for shown in told if "text/html" in shown.get("data", {})]
        assert lines
        assert all(line.startswith("finished: 2 of 2 trials finished; best val_loss") for line in lines)
        assert [path.name for path in tmp_path.glob("*/report.html")] == ["report.html"]
