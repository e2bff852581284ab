"""What a page shows of cells, and of runs that take long or fail, with one JupyterLab."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from lab import Lab, Notebook, screenshot
from playwright.sync_api import Locator, Page, expect

from nbgpu.config import own_file

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.subshells]

START = "%load_ext nbgpu\nimport nbgpu\n%nbgpu start --gpus none --ranks 2"
PATIENCE_MS = 240_000

DRAW = "%%distributed\ntorch.rand(1).item()"
SLOW = "import time; time.sleep(0.6)"
"""So long that a cell gets a widget for its text."""
CELLS = {
    "start": f"{START} --cell-seed 5",
    "draw": DRAW,
    "restart": "%nbgpu restart",
    "draw again": DRAW,
    "time": f"%%time\n%%distributed\n{SLOW}\nprint('timed on', rank)",
    "capture": f"%%capture kept\n%%distributed\n{SLOW}\nprint('captured on', rank)",
    "show captured": "print(kept.stdout, end='')",
    "comment": "# A comment, and an empty line.\n\n%%distributed --ranks 1\nprint('on', rank)",
    "bars": f"""%%distributed
from tqdm.auto import tqdm
print('before')
for _ in tqdm(range(3), desc='bar', bar_format='{{desc}} {{n}}'): pass
print('between')
for i in range(4): print(f'\\rstep {{i}}', end='', flush=True)
print('\\nafter')
{SLOW}""",
    "import": "%%distributed\nfrom edited_before import answer\nanswer()",
    "autoreload": "%nbgpu autoreload on",
    "answer": "%distributed answer()",
    "stop": "%nbgpu stop",
}

HOLDS_THE_GIL = """
import ctypes, os, sys, time
import torch.distributed as dist
if dist.get_rank() == 1:
    time.sleep(1)
    open({began!r}, "w").close()
    until_s = time.monotonic() + 300
    sys.setswitchinterval(60)  # no other thread gets the GIL meanwhile; PyDLL keeps it during calls
    while ctypes.PyDLL(None).access({until!r}, os.F_OK) and time.monotonic() < until_s: pass
    sys.setswitchinterval(0.005)
"""
"""Like packages that take long to load: the rank computes until a file is there, and its telemetry is silent
meanwhile."""
SLOW_RESULT = """
    def result(self, model, device):
        until_s = time.monotonic() + 300
        while not os.path.exists({until!r}) and time.monotonic() < until_s: pass
        return {{}}
"""
TRAIN = "run = nbgpu.current().train('{}', steps=4, val_every=0, threads=1)\nrun.panel()"
RUNS = [
    START,
    DRAW,
    TRAIN.format("slow.py"),
    "run.wait().status",
    "nbgpu.controls('wrong_shape.py')",
    "nbgpu.controls('wrong_import.py')",
    f"{TRAIN.format('wrong_shape.py')}\nrun.wait()",
    "%nbgpu stop",
]
WAIT_FOR_SILENCE = """
import time
while not run.over and (silent_s := run.statuses()[1].silent_s) < 4: time.sleep(0.05)
print(silent_s)
"""
NOTICE = ".jp-OutputArea-output b:not(.nbgpu-ranks)"
COLLECT_WORDS = """notice => {
    const said = (window.said = {});
    const places = ['.nbgpu-state', '.nbgpu-chip-state', '.nbgpu-chip-warning', '.nbgpu-hang', notice];
    for (const place of places) said[place] = [];
    new MutationObserver(() => {
        for (const place of places)
            for (const { textContent: words } of document.querySelectorAll(place))
                if (words && !said[place].includes(words)) said[place].push(words);
    }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Collects, by the place where they stand, all words of a panel and of the notices below cells from here
on."""


def cell_of(page: Page, index: int) -> Locator:
    return page.locator(".jp-CodeCell").nth(index)


def run_and_see(notebook: Notebook, index: int) -> list[str]:
    """Run a cell; return the lines that one sees under it when it has ended."""
    notebook.run_cell(index)
    notebook.wait_until_idle()
    outputs = cell_of(notebook.page, index).locator(".jp-OutputArea-output").all_inner_texts()
    return [line for output in outputs for line in output.splitlines() if line]


def of_ranks(lines: list[str]) -> list[str]:
    """What follows '[0]' and '[1]', in two lines."""
    found = [re.fullmatch(r"\[(\d)\] (.*)", line) for line in lines]
    assert [match and match[1] for match in found] == ["0", "1"], lines
    return [match[2] for match in found if match]


@pytest.mark.timeout(900)
def test_cells_show_what_one_expects_of_them(lab: Lab, page: Page) -> None:
    module = lab.root / "edited_before.py"
    module.write_text("def answer():\n    return 'old'\n")
    lab.write_notebook("cells.ipynb", list(CELLS.values()))
    page.set_viewport_size({"width": 1280, "height": 1800})
    notebook = Notebook(page, lab, "cells.ipynb")
    notebook.open()
    seen: dict[str, list[str]] = {}
    for index, name in enumerate(CELLS):
        if name == "autoreload":
            module.write_text("def answer():\n    return 'entirely new'\n")
        seen[name] = run_and_see(notebook, index)
    screenshot(page, "cells-light")

    # With a seed each rank draws its own numbers, and the same ones at every start.
    drawn = of_ranks(seen["draw"])
    assert drawn[0] != drawn[1]
    assert of_ranks(seen["draw again"]) == drawn

    assert of_ranks(seen["time"][:2]) == ["timed on 0", "timed on 1"]
    assert [line.partition(":")[0] for line in seen["time"][2:]] == ["CPU times", "Wall time"]
    assert seen["capture"] == []
    assert of_ranks(seen["show captured"]) == ["captured on 0", "captured on 1"]
    assert seen["comment"] == ["[1] on 1"]

    without_labels = [line for line in seen["bars"] if line != "[0-1]"]
    assert without_labels == ["before", "bar 3", "between", "step 3", "after"]

    assert seen["import"] == ["[0-1] 'old'"]
    assert seen["autoreload"][1:] == ["edited_before was edited, and loaded again"]
    assert seen["answer"] == ["[0-1] 'entirely new'"]


@pytest.mark.timeout(900)
def test_runs_that_take_long_or_fail_say_why(lab: Lab, page: Page, tmp_path: Path) -> None:
    wrong_shape = own_file.create(str(lab.root / "wrong_shape.py"))
    good = wrong_shape.read_text()
    wrong_shape.write_text(good.replace("nn.Linear(1, width)", "nn.Linear(2, width)"))
    (lab.root / "wrong_import.py").write_text(f"import torch_vision\n{good}")
    loads, loaded, worked_out = (tmp_path / name for name in ("loads", "loaded", "worked_out"))
    imports = HOLDS_THE_GIL.format(began=str(loads), until=str(loaded).encode())
    (lab.root / "slow.py").write_text(f"{imports}{good}{SLOW_RESULT.format(until=str(worked_out))}")
    lab.write_notebook("runs.ipynb", RUNS)
    page.set_viewport_size({"width": 1280, "height": 1300})
    notebook = Notebook(page, lab, "runs.ipynb")
    notebook.open()
    run_and_see(notebook, 0)
    with_no_seed = of_ranks(run_and_see(notebook, 1))
    assert with_no_seed[0] != with_no_seed[1]

    page.evaluate(COLLECT_WORDS, NOTICE)
    run_and_see(notebook, 2)
    give_up_s = time.monotonic() + PATIENCE_MS / 1000
    while not loads.exists():
        assert time.monotonic() < give_up_s
        page.wait_for_timeout(50)
    # Longer than the silence that a panel speaks of while a rank trains.
    assert float(notebook.in_kernel(WAIT_FOR_SILENCE)) >= 4
    loading = page.get_by_role("listitem", name=re.compile(r"^rank 1, .*\bloading packages\b"))
    expect(loading).to_be_visible(timeout=PATIENCE_MS)
    page.wait_for_timeout(1500)
    screenshot(page, "loading-packages")
    seen = page.evaluate("() => said")
    assert "loading packages" in seen[".nbgpu-state"]
    assert (seen[".nbgpu-chip-warning"], seen[".nbgpu-hang"], seen[NOTICE]) == ([], [], [])
    loaded.touch()
    notebook.run_cell(3)
    for said in (r"^rank 0, .*\bworking out the result\b", r"^rank 1, .*\bwaiting for rank 0\b"):
        expect(page.get_by_role("listitem", name=re.compile(said))).to_be_visible(timeout=PATIENCE_MS)
    # What a slow machine made of the way here is not asked.
    page.evaluate("() => { for (const place in said) said[place] = []; }")
    # Longer than a notice of a hang would take to come.
    page.wait_for_timeout(7000)
    screenshot(page, "result")
    worked_out.touch()
    expect(cell_of(page, 3).get_by_text("'finished'")).to_be_visible(timeout=PATIENCE_MS)
    seen = page.evaluate("() => said")
    assert "working out the result" in seen[".nbgpu-state"]
    assert (seen[".nbgpu-hang"], seen[NOTICE]) == ([], [])

    line = wrong_shape.read_text().splitlines().index("        return functional.mse_loss(model(x), y)") + 1
    place = rf"File \S*/wrong_shape\.py:{line}, in WrongShape\.loss"
    message = "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    for index, where, what in (
        (4, place, message),
        (5, r"File \S*/wrong_import\.py:1\n----> 1 import torch_vision\n", "No module named 'torch_vision'"),
    ):
        run_and_see(notebook, index)
        controls = cell_of(page, index)
        controls.locator(".jupyter-button", has_text="Start").click()
        expect(controls.get_by_role("alert").filter(has_text=what)).to_be_visible(timeout=PATIENCE_MS)
        told = controls.locator("pre", has_text="File ").inner_text()
        assert re.search(where, told)
        # The person's file and no other, such as nbgpu's own.
        assert told.count("File ") == 1
        expect(controls.locator(".jupyter-button", has_text="Start")).to_be_enabled(timeout=PATIENCE_MS)
    page.set_viewport_size({"width": 900, "height": 1300})
    notebook.set_theme("JupyterLab Dark")
    controls.locator("pre", has_text="File ").scroll_into_view_if_needed()
    page.wait_for_timeout(1000)
    screenshot(page, "wrong-recipe-dark-900")
    page.set_viewport_size({"width": 1280, "height": 1300})
    notebook.set_theme("JupyterLab Light")

    told = "\n".join(run_and_see(notebook, 6))
    screenshot(page, "wrong-recipe-light")
    assert re.search(place, told)
    assert told.count("File ") == 1
    assert re.search(rf"^{message}", told, re.M)
    run_and_see(notebook, 7)
