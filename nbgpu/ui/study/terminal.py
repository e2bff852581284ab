"""A study in a terminal: a table that fills while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nbgpu.client.scaling import study_table
from nbgpu.text.console import say, width_of, wrapped
from nbgpu.text.tables import aligned
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
        with Live(_view(study, console), console=console, auto_refresh=False, transient=True) as live:
            _wait(study, console, lambda: live.update(_view(study, console), refresh=True), _PERIOD_S)
    else:
        _wait(study, console, lambda: say(console, study.describe()), LINE_PERIOD_S)
    say(console, study.text(width_of(console)))


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
            say(console, "ends after the current step; nbgpu scaling --resume FOLDER goes on")


def _view(study: Study, console: Console) -> Text:
    summary = study.summary()
    header, rows = study_table.header_and_rows(study.plan, summary)
    table = aligned([header, *rows], range(len(header)), console.width)
    notes = study_table.notes(study.plan, summary)
    return Text(wrapped("\n".join([*table, *notes, study.describe()]), console.width))
