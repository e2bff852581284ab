"""The progress of a prediction in a terminal: a bar, or a line now and then where the output is a file."""

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
    """Give a function that shows the progress as long as the block lasts."""
    if not console.is_terminal:
        yield _Lines(console).show
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


class _Lines:
    """Prints the progress as a line from time to time, for an output that is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_mono_s = time.monotonic() + LINE_PERIOD_S

    def show(self, progress: Progress) -> None:
        if time.monotonic() >= self._next_mono_s:
            self._next_mono_s += LINE_PERIOD_S
            self._console.print(in_words(progress), highlight=False)
