"""The report of a sweep: `report.html` in its folder, which opens with no network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

from nbgpu.machine.files import write_whole
from nbgpu.run_folder import names
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.run.html_parts import table
from nbgpu.ui.run.snapshot import page
from nbgpu.ui.sweep.rows import columns, rows
from nbgpu.ui.sweep.view import plotly_figure, table_html

if TYPE_CHECKING:
    from nbgpu.client.sweeps.sweep import Sweep

_CSS = ".nbgpu-sweep-error { background: rgba(255,0,0,.13); white-space: pre-wrap; }"


def write_report(sweep: Sweep) -> Path:
    """Write the report; OSError where the folder cannot be written to."""
    path = sweep.folder / names.REPORT
    write_whole(path, report_html(sweep))
    return path


def report_html(sweep: Sweep) -> str:
    """Return the report as one page: the trials, their curves, the failures, and the settings that all
    share."""
    headline = sweep.describe()
    trials = table_html(columns(sweep), rows(sweep, sweep.ranking()))
    body = [
        f"<style>{_CSS}</style>",
        f"<section><h2>Trials, the best first</h2>{trials}</section>",
        f'<section><h2>Curves</h2><div id="charts" role="img" aria-label="{html.escape(headline)}"></div></section>',
        _failures(sweep),
        f"<section><h2>Settings that all trials share</h2>{table((), sweep.plan.shared.items())}</section>",
    ]
    return page(
        title=f"{sweep.plan.recipe} {sweep.folder.name}",
        heading=f"{html.escape(sweep.plan.recipe)} <small>{html.escape(sweep.folder.name)}</small>",
        headline=headline,
        body="".join(body),
        figures=[plotly_figure(sweep)],
    )


def _failures(sweep: Sweep) -> str:
    """The ranks' own tracebacks."""
    parts = [
        f"<p>trial {trial.number} ({html.escape(trial.label)}), rank {f.rank}: {html.escape(f.error_type)}: "
        f"{html.escape(f.message)}</p><pre>{to_html(f.traceback)}</pre>"
        for trial in sweep.trials
        for f in trial.failures()
    ]
    return f"<section><h2>Failures</h2>{''.join(parts)}</section>" if parts else ""
