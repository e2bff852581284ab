"""Execute a notebook from a terminal, show its progress, and write it as a notebook and as an HTML page.

    python -m nbgpu.client.demo notebooks/00_first_run.ipynb demo

The notebook's kernel works in the given folder, so that all files that it writes, such as runs, are there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import DictLoader
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbconvert import HTMLExporter
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from traitlets.config import Config

from nbgpu.run_folder import names
from nbgpu.text.console import CommandConsole

CELL_TIMEOUT_S = 1200
"""A cell that runs longer than this ends the execution."""
NOTE_PERIOD_S = 10.0
"""The least time between two notes about a running cell if the output is no terminal."""
_SKIPPED = "skip-execution"
"""The tag of cells that nbclient does not execute."""

# nbconvert's page fetches require.js, MathJax, Mermaid and the widget manager from the network. The executed
# notebook has static figures and plain Markdown, which need none of them.
_OFFLINE_PAGE = """\
{%- extends "lab/index.html.j2" -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
"""


def execute(notebook: Path, folder: Path, console: Console) -> bool:
    """Execute every cell and write `NAME.ipynb` and `NAME.html` into `folder`, which is made if it does not
    exist.

    After a failure both are written with the outputs up to the failing cell.

    Returns:
        Whether all cells ran. Otherwise the failing cell and its traceback were printed.
    """
    content = nbformat.read(notebook, as_version=4)
    folder.mkdir(parents=True, exist_ok=True)
    begun_s = time.time()
    problem = run_cells(content, folder, console)
    executed = folder / notebook.name
    page = executed.with_suffix(".html")
    nbformat.write(content, executed)
    page.write_text(offline_page(content, notebook.stem))

    console.print(f"notebook  {executed.resolve()}", soft_wrap=True)
    console.print(f"page      {page.resolve()}", soft_wrap=True)
    reports = [p for p in folder.rglob(names.REPORT) if p.stat().st_mtime >= begun_s]
    for report in sorted(reports, key=lambda p: p.stat().st_mtime):
        console.print(f"report    {report.resolve()}", soft_wrap=True)
    if problem is not None:
        console.print(problem)
    return problem is None


def offline_page(content: Any, title: str) -> str:
    """The notebook as one HTML page that fetches nothing."""
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"offline.html.j2": _OFFLINE_PAGE})],
        template_file="offline.html.j2",
        embed_images=True,
    )
    page, _ = exporter.from_notebook_node(content, resources={"metadata": {"name": title}})
    return str(page)


class _WatchedClient(NotebookClient):
    """A NotebookClient that passes on one-line texts which a running cell displays, such as the progress of a
    run."""

    def __init__(self, content: Any, note: Callable[[str], None], **settings: Any) -> None:
        super().__init__(content, **settings)
        self._note = note
        self.is_interrupted = False

    async def _async_cleanup_kernel(self) -> None:
        """End the kernel. After Ctrl-C nbclient calls this twice, and its own method fails the second
        time."""
        if self.km is None:
            self.is_interrupted = True
        else:
            await super()._async_cleanup_kernel()

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Pass on the one-line text of a display that is updated, and let nbclient handle the message."""
        if msg["msg_type"] == "update_display_data":
            text = msg["content"]["data"].get("text/plain", "")
            if text and "\n" not in text:
                self._note(text)
        return super().process_message(msg, cell, cell_index)


def is_skipped(cell: Any) -> bool:
    """Whether nbclient skips a cell. In nbgpu's notebooks it is the one that installs packages on Colab and
    Kaggle."""
    return _SKIPPED in cell.metadata.get("tags", ())


def run_cells(content: Any, folder: Path, console: Console) -> Text | None:
    """Execute the notebook `content` in place, with `folder` as the kernel's working folder.

    Returns:
        The error of the cell that failed, or of a kernel that died; None if all cells ran.
    """
    code_cells = [
        i
        for i, cell in enumerate(content.cells)
        if cell.cell_type == "code" and cell.source.strip() and not is_skipped(cell)
    ]
    # Otherwise, behind a cell that fails, old outputs would look like those of this execution.
    for i in code_cells:
        content.cells[i].update(outputs=[], execution_count=None)
    begun_s = noted_s = time.monotonic()
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task("starting the kernel")

    def line(cell: Any, index: int) -> str:
        first = next(text for text in cell.source.splitlines() if text.strip())
        return f"cell {code_cells.index(index) + 1}/{len(code_cells)}  {first.strip()[:70]}"

    def begin(cell: Any, cell_index: int) -> None:
        nonlocal begun_s
        begun_s = time.monotonic()
        progress.reset(task, description=Text(line(cell, cell_index)).markup)

    def end(cell: Any, cell_index: int, execute_reply: Any) -> None:
        elapsed_s = time.monotonic() - begun_s
        mark = "" if execute_reply["content"]["status"] == "ok" else "  raised"
        progress.console.print(Text(f"{elapsed_s:7.1f} s  {line(cell, cell_index)}{mark}"), soft_wrap=True)

    def note(text: str) -> None:
        nonlocal noted_s
        if console.is_terminal:
            progress.update(task, description=escape(text))
        elif time.monotonic() - noted_s > NOTE_PERIOD_S:
            noted_s = time.monotonic()
            console.print(Text(f"           {text}"), soft_wrap=True)

    client = _WatchedClient(
        content,
        note,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=begin,
        on_cell_executed=end,
    )
    # If the output is no terminal, there is no spinner: each cell prints a line at its end, and a long one
    # also notes about its progress.
    spinner: AbstractContextManager[object] = progress if console.is_terminal else nullcontext()
    # The kernel's stderr, which belongs to no cell, is shown only if the kernel dies: at a normal end it may
    # have lines too (ipykernel 7.4 writes to sockets that it has closed).
    with spinner, tempfile.TemporaryFile("w+", errors="replace") as kernel_stderr:
        try:
            client.execute(stderr=kernel_stderr)
        except CellExecutionError as error:
            return Text.from_ansi(str(error))
        # A kernel that dies is a DeadKernelError, and one that does not start a RuntimeError, its base.
        except (CellTimeoutError, RuntimeError) as error:
            if client.is_interrupted:
                raise KeyboardInterrupt from None
            kernel_stderr.seek(0)
            return Text(f"{kernel_stderr.read()}{type(error).__name__}: {error}")
    return None


def main(arguments: list[str] | None = None) -> int:
    """Execute the notebook that the command line names; return the exit code: 0 if every cell ran, else 1."""
    parser = argparse.ArgumentParser(prog="python -m nbgpu.client.demo", description="Execute a notebook.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("folder", type=Path, help="where the executed notebook goes, and what it writes")
    options = parser.parse_args(arguments)
    if not options.notebook.is_file():
        parser.error(f"there is no notebook {options.notebook}")
    # The debugger of older kernels would print a warning here. ipyparallel sets this variable as well.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return 0 if execute(options.notebook, options.folder, CommandConsole()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
