"""A study in a terminal: a table that fills while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from nbgpu.client.scaling import study_table
from nbgpu.text.console import say, width_of
from nbgpu.text.tables import aligned
from nbgpu.ui import table_in_terminal

if TYPE_CHECKING:
    from nbgpu.client.scaling.study import Study


def follow(study: Study, console: Console) -> None:
    """Show the points until the study is over, and then its table. Ctrl-C ends it after the current step."""
    stopping = "ends after the current step; nbgpu scaling --resume FOLDER goes on"
    table_in_terminal.follow(study, console, lambda: _lines(study, console), stopping)
    say(console, study.text(width_of(console)))


def _lines(study: Study, console: Console) -> list[str]:
    summary = study.summary()
    header, rows = study_table.header_and_rows(study.plan, summary)
    table = aligned([header, *rows], range(len(header)), console.width)
    return [*table, *study_table.notes(study.plan, summary)]
