"""A sweep in a terminal: a table that changes while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from nbgpu.text.console import say, width_of
from nbgpu.text.tables import aligned
from nbgpu.ui import table_in_terminal
from nbgpu.ui.sweep.rows import columns, rows

if TYPE_CHECKING:
    from nbgpu.client.sweeps.sweep import Sweep

_MAX_ROWS = 20
"""The most rows of a live table, because more would not fit on a screen."""


def follow(sweep: Sweep, console: Console) -> None:
    """Show the trials until the sweep is over, and then its table. Ctrl-C stops all runs with a
    checkpoint."""
    stopping = "stopping all runs after the step they are in, with a checkpoint"
    table_in_terminal.follow(sweep, console, lambda: _table(sweep, _MAX_ROWS, console.width), stopping)
    say(console, "\n".join(_table(sweep, len(sweep.trials), width_of(console))))
    for trial in sweep.trials:
        if trial.error is not None:
            say(console, f"\ntrial {trial.number} ({trial.label}) failed:")
            # This prints the rank's own traceback, as a notebook does.
            console.print(Text.from_ansi("\n".join(trial.error._render_traceback_())))
    say(console, f"{sweep.describe()}\n{sweep.folder}")


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
