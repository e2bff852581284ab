"""A study in a terminal: a table that fills while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nbgpu.client.scaling import study_table
from nbgpu.performance.study_results import Gap
from nbgpu.ui.run.terminal import LINE_PERIOD_S

if TYPE_CHECKING:
    from nbgpu.client.scaling.study import Study

_PERIOD_S = 0.5


def follow(study: Study, console: Console) -> None:
    """Show the points until the study is over. Ctrl-C ends it after the current step, and a second one leaves
    at once.

    Where the output is not a terminal, there is one line every few seconds instead, and the table at the end.
    """
    if console.is_terminal:
        with Live(_view(study), console=console, auto_refresh=False, transient=True) as live:
            _wait(study, console, lambda: live.update(_view(study), refresh=True), _PERIOD_S)
    else:
        _wait(study, console, lambda: _print(console, study.describe()), LINE_PERIOD_S)
    _print(console, str(study))


def _wait(study: Study, console: Console, show: Callable[[], None], period_s: float) -> None:
    is_stopping = False
    due_s = time.monotonic()
    while not study.over:
        try:
            if time.monotonic() >= due_s:
                due_s += period_s
                show()
            time.sleep(min(period_s, _PERIOD_S))
        except KeyboardInterrupt:
            if is_stopping:
                raise
            is_stopping = True
            study.stop()
            _print(console, "ends after the current step; nbgpu scaling --resume FOLDER goes on")


def _print(console: Console, text: str) -> None:
    """Print without wrapping, because a path that is cut in two cannot be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _view(study: Study) -> Group:
    summary = study.summary()
    header, rows = study_table.header_and_rows(study.plan, summary)
    table = Table(*map(escape, header), box=None, header_style="bold", pad_edge=False)
    for found, cells in zip(summary, rows, strict=True):
        style = "red" if isinstance(found, Gap) and found.why else None
        table.add_row(*map(escape, cells), style=style)
    notes = study_table.notes(study.plan, summary)
    return Group(table, *map(Text, notes), Text(study.describe()))
