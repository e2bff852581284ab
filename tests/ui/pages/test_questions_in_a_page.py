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
@pytest.mark.long
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

            def answer(typed: str) -> str:
                """Types it in; returns what was asked."""
                box.wait_for()
                asked = prompt.inner_text()
                answered = box.element_handle()
                box.fill(typed)
                box.press("Enter")
                # The page takes it away a moment after it has shown the next one.
                page.wait_for_function("box => !box.isConnected", arg=answered)
                return asked

            notebook.run_cell(2)
            for command in ("p apples, by", "q"):
                assert answer(command).startswith("rank 1: ipdb>")
            notebook.wait_until_idle()

            notebook.run_cell(3)
            asked = [answer(name).strip() for name in ("Ada", "Grace")]
            assert sorted(asked) == ["rank 0: name?", "rank 1: name?"]
            notebook.wait_until_idle()
            notebook.run_cell(4)
            notebook.wait_until_idle()
            debugged, answered = notebook.save().cells[2:4]
        lab.shut_kernels_down()
    assert "rank 1 failed with ZeroDivisionError" in debugged.outputs[0].text
    assert any("(21, 0)" in output.get("text", "") for output in debugged.outputs)
    printed = "".join(output.get("text", "") for output in answered.outputs)
    assert "Ada 2" in printed
    assert "Grace 2" in printed
