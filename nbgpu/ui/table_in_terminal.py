"""A sweep or a study in a terminal: a table that is updated, or lines if the output is no terminal."""

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
from nbgpu.ui.sweep.rows import columns, rows

if TYPE_CHECKING:
    from nbgpu.client.scaling.study import Study
    from nbgpu.client.sweeps.sweep import Sweep
    from nbgpu.ui.followed import Followed

_PERIOD_S = 0.5
_MAX_ROWS = 20
"""The most rows of a live table, so that the table fits on a screen."""


def follow_study(study: Study, console: Console) -> None:
    """Show the points until the study is over, and then its table. Ctrl-C ends it after the current step."""
    stopping = "ends after the current step; nbgpu scaling --resume FOLDER goes on"
    _follow(study, console, lambda: _table_of_study(study, console), stopping)
    say(console, study.text(width_of(console)))


def _table_of_study(study: Study, console: Console) -> list[str]:
    summary = study.summary()
    header, rows = study_table.header_and_rows(study.plan, summary)
    table = aligned([header, *rows], range(len(header)), console.width)
    return [*table, *study_table.notes(study.plan, summary)]


def follow_sweep(sweep: Sweep, console: Console) -> None:
    """Show the trials until the sweep is over, and then its table. Ctrl-C stops all runs with a
    checkpoint."""
    stopping = "stopping all runs after the step they are in, with a checkpoint"
    _follow(sweep, console, lambda: _table_of_sweep(sweep, _MAX_ROWS, console.width), stopping)
    say(console, "\n".join(_table_of_sweep(sweep, len(sweep.trials), width_of(console))))
    for trial in sweep.trials:
        if trial.error is not None:
            say(console, f"\ntrial {trial.number} ({trial.label}) failed:")
            # This prints the rank's own traceback, as a notebook does.
            console.print(Text.from_ansi("\n".join(trial.error._render_traceback_())))
    say(console, f"{sweep.describe()}\n{sweep.folder}")


def _table_of_sweep(sweep: Sweep, max_rows: int, width: int | None) -> list[str]:
    """The table of the trials, the best first. If there are more than `max_rows`, it has the trials at work
    first, and then the best of the others."""
    ranking = sweep.ranking()
    if len(ranking) > max_rows:
        idle = ("waiting", "finished", "failed", "stopped")
        ranking = sorted(ranking, key=lambda trial: trial.state in idle)
    shown = rows(sweep, ranking[:max_rows])
    cells = [(*row.cells, row.error.partition("\n")[0]) for row in shown]
    lines = aligned([(*columns(sweep), "error"), *cells], width=width)
    return lines if len(ranking) <= max_rows else [*lines, f"and {len(ranking) - max_rows} more"]


def _follow(followed: Followed, console: Console, lines: Callable[[], list[str]], stopping: str) -> None:
    """Show the table of a sweep or a study until the end. The first Ctrl-C stops the work, and a second one
    leaves at once.

    Args:
        followed: the sweep or the study.
        console: the terminal, or a file, to which a line is printed periodically.
        lines: returns the present table.
        stopping: a sentence about the effect of the first Ctrl-C.
    """

    def view() -> Text:
        return Text(wrapped("\n".join([*lines(), followed.describe()]), console.width))

    if console.is_terminal:
        with Live(view(), console=console, auto_refresh=False, transient=True) as live:
            _wait(followed, console, lambda: live.update(view(), refresh=True), _PERIOD_S, stopping)
    else:
        _wait(followed, console, lambda: say(console, followed.describe()), LINE_PERIOD_S, stopping)


def _wait(
    followed: Followed, console: Console, show: Callable[[], None], period_s: float, stopping: str
) -> None:
    """Call `show` periodically until the sweep or the study is over. The first Ctrl-C stops the work, and the
    second is raised."""
    is_stopping = False
    due_s = time.monotonic()
    while not followed.over:
        try:
            if time.monotonic() >= due_s:
                due_s += period_s
                show()
            time.sleep(min(period_s, _PERIOD_S))
        except KeyboardInterrupt:
            if is_stopping:
                raise
            is_stopping = True
            followed.stop()
            say(console, stopping)
