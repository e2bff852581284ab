"""Questions of ranks and the debugger's prompt, typed into the box that JupyterLab shows for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import chromium
from lab import Notebook, browser_page, jupyter_lab

START = "%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2"
FAILS = "%%distributed\ndef share(apples, by):\n    return apples / by\nshare(21, 1 - rank)\ndist.barrier()"
ASKS = "%%distributed\nname = input('name? ')\ntotal = torch.ones(1)\ndist.all_reduce(total)\nprint(name, int(total))"


@pytest.mark.browser
@pytest.mark.slow
def test_typed_into_a_page(tmp_path: Path) -> None:
    path = chromium()
    assert path is not None, "the marker 'browser' skips where there is none"
    with jupyter_lab(tmp_path) as lab:
        lab.write_notebook("ask.ipynb", [START, FAILS, "%debug", ASKS, "%nbgpu stop"])
        with browser_page(path, tmp_path) as page:
            notebook = Notebook(page, lab, "ask.ipynb")
            notebook.open()
            for index in (0, 1):
                notebook.run_cell(index)
                notebook.wait_until_idle()
            box, prompt = page.locator(".jp-Stdin-input"), page.locator(".jp-Stdin-prompt")

            def answer(asked: str, typed: str) -> None:
                prompt.get_by_text(asked).wait_for()
                box.fill(typed)
                box.press("Enter")
                # The page turns an answered box into text, a moment after it has shown the next one.
                page.locator(".jp-OutputArea-output", has_text=f"{asked}  {typed}").wait_for()

            notebook.run_cell(2)
            answer("rank 1: ipdb>", "p apples, by")
            page.get_by_text("(21, 0)").wait_for()
            answer("rank 1: ipdb>", "q")
            notebook.wait_until_idle()

            notebook.run_cell(3)
            for _ in range(2):
                rank = int(prompt.inner_text()[5])
                answer(f"rank {rank}: name?", f"name of {rank}")
            notebook.wait_until_idle()
            notebook.run_cell(4)
            notebook.wait_until_idle()
            debugged, asked = notebook.save().cells[2:4]
        lab.shut_kernels_down()
    assert "rank 1 failed with ZeroDivisionError" in debugged.outputs[0].text
    printed = "".join(output.get("text", "") for output in asked.outputs)
    assert "name of 0 2" in printed
    assert "name of 1 2" in printed
