"""A sweep in a terminal: a table that changes while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nbgpu.text.console import say, width_of, wrapped
from nbgpu.text.tables import aligned
from nbgpu.ui.run.terminal import LINE_PERIOD_S
from nbgpu.ui.sweep.rows import columns, rows

if TYPE_CHECKING:
    from nbgpu.client.sweeps.sweep import Sweep

_PERIOD_S = 0.5
_MAX_ROWS = 20
"""The most rows of a live table, because more would not fit on a screen."""


def follow(sweep: Sweep, console: Console) -> None:
    """Show the trials until the sweep is over. Ctrl-C stops all runs with a checkpoint, and a second one
    leaves at once.

    Where the output is not a terminal, there is one line every few seconds instead, and the table at the end.
    """
    if console.is_terminal:
        with Live(_view(sweep, console), console=console, auto_refresh=False, transient=True) as live:
            _wait(sweep, console, lambda: live.update(_view(sweep, console), refresh=True))
    else:
        _wait(sweep, console, _every(LINE_PERIOD_S, lambda: say(console, sweep.describe())))
    say(console, "\n".join(_table(sweep, len(sweep.trials), width_of(console))))
    for trial in sweep.trials:
        if trial.error is not None:
            say(console, f"\ntrial {trial.number} ({trial.label}) failed:")
            # This prints the rank's own traceback, as a notebook does.
            console.print(Text.from_ansi("\n".join(trial.error._render_traceback_())))
    say(console, f"{sweep.describe()}\n{sweep.folder}")


def _wait(sweep: Sweep, console: Console, show: Callable[[], None]) -> None:
    is_stopping = False
    while not sweep.over:
        try:
            show()
            time.sleep(_PERIOD_S)
        except KeyboardInterrupt:
            if is_stopping:
                raise
            is_stopping = True
            sweep.stop()
            say(console, "stopping all runs after the step they are in, with a checkpoint")


def _every(period_s: float, show: Callable[[], None]) -> Callable[[], None]:
    due_s = time.monotonic() + period_s

    def show_when_due() -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s += period_s
            show()

    return show_when_due


def _view(sweep: Sweep, console: Console) -> Text:
    lines = [*_table(sweep, _MAX_ROWS, console.width), sweep.describe()]
    return Text(wrapped("\n".join(lines), console.width))


def _table(sweep: Sweep, max_rows: int, width: int | None) -> list[str]:
    """The table of the trials. If there are too many, the active ones come first, and then the best."""
    ranking = sweep.ranking()
    if len(ranking) > max_rows:
        idle = ("waiting", "finished", "failed", "stopped")
        ranking = sorted(ranking, key=lambda trial: trial.state in idle)
    shown = rows(sweep, ranking[:max_rows])
    cells = [(*row.cells, row.error.partition("\n")[0]) for row in shown]
    lines = aligned([(*columns(sweep), "error"), *cells], width=width)
    return lines if len(ranking) <= max_rows else [*lines, f"and {len(ranking) - max_rows} more"]
