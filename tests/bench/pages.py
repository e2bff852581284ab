"""An empty cell's round trip as a person has it: run in a notebook that is open in JupyterLab, in
Chromium."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from conftest import chromium
from lab import Notebook, browser_page, jupyter_lab

NUM_FOR_WARMING_UP = 5

IN_TURNS = """
async ([first, numCells, numTurns]) => {
    const notebook = jupyterapp.shell.currentWidget.content;
    const times = Array.from({ length: numCells }, () => []);
    for (let turn = 0; turn < numTurns; turn++)
        for (let cell = 0; cell < numCells; cell++) {
            notebook.activeCellIndex = first + cell;
            notebook.deselectAll();
            const started = performance.now();
            await jupyterapp.commands.execute('notebook:run-cell');
            times[cell].push(performance.now() - started);
        }
    return times;
}
"""


def round_trips_ms(setup: list[str], cells: Mapping[str, str], num_turns: int) -> dict[str, list[float]]:
    """By name, the time from the command to run a cell until the page has shown its end; in turns.

    Args:
        setup: cells that are run once, before.
        cells: by name, what is measured.
        num_turns: how often.
    """
    browser = chromium()
    if browser is None:
        raise SystemExit("there is no Chromium to open a page with")
    with tempfile.TemporaryDirectory(prefix="nbgpu-bench-") as path:
        folder = Path(path)
        with jupyter_lab(folder) as lab, browser_page(browser, folder) as page:
            lab.write_notebook("cells.ipynb", [*setup, *cells.values()])
            notebook = Notebook(page, lab, "cells.ipynb")
            notebook.open()
            for index in range(len(setup)):
                notebook.run_cell(index)
                notebook.wait_until_idle()
            page.set_default_timeout(0)
            asked = [len(setup), len(cells), NUM_FOR_WARMING_UP + num_turns]
            times = page.evaluate(IN_TURNS, asked)
            saved = notebook.save()
            failed = [
                cell.source for cell in saved.cells for out in cell.outputs if out.output_type == "error"
            ]
            if failed:
                raise RuntimeError(f"failed in the page: {failed}")
            lab.shut_kernels_down()
    return {name: taken[NUM_FOR_WARMING_UP:] for name, taken in zip(cells, times, strict=True)}
