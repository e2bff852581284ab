"""The progress of a prediction in a terminal: a bar, or a line every few seconds if the output is a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from nbgpu.run_folder.predictions import Progress
from nbgpu.ui.prediction import in_words
from nbgpu.ui.run.terminal import LINE_PERIOD_S


@contextmanager
def shown(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows the progress during the `with` block."""
    if not console.is_terminal:
        next_line_s = time.monotonic() + LINE_PERIOD_S

        def print_line(progress: Progress) -> None:
            nonlocal next_line_s
            if time.monotonic() >= next_line_s:
                next_line_s += LINE_PERIOD_S
                console.print(in_words(progress), highlight=False)

        yield print_line
        return
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    # Only the caller's thread draws.
    with Bars(*columns, console=console, auto_refresh=False) as bars:
        task = bars.add_task("", total=None)

        def show(progress: Progress) -> None:
            bars.update(
                task,
                description=in_words(progress),
                total=progress.num_samples or None,
                completed=progress.num_done,
            )
            bars.refresh()

        yield show
