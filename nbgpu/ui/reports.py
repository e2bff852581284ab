"""The reports of sweeps and studies: `report.html` in their folders, which opens with no network."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from nbgpu.client.scaling import study_table
from nbgpu.machine.files import write_whole
from nbgpu.run_folder import names
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.run.html_parts import table
from nbgpu.ui.run.snapshot import page
from nbgpu.ui.study import view as study_view
from nbgpu.ui.sweep import view as sweep_view
from nbgpu.ui.sweep.rows import columns, rows

if TYPE_CHECKING:
    from nbgpu.client.scaling.study import Study
    from nbgpu.client.sweeps.sweep import Sweep

_CSS = ".nbgpu-sweep-error { background: rgba(255,0,0,.13); white-space: pre-wrap; }"


def write_sweep(sweep: Sweep) -> None:
    """Write the report; OSError where the folder cannot be written to."""
    write_whole(sweep.folder / names.REPORT, sweep_html(sweep))


def sweep_html(sweep: Sweep) -> str:
    """Return the report as one page: the trials, their curves, the failures, and the settings that all
    share."""
    headline = sweep.describe()
    trials = sweep_view.table_html(columns(sweep), rows(sweep, sweep.ranking()))
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
        figures=[sweep_view.plotly_figure(sweep)],
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


def write_study(study: Study) -> None:
    """Write the report; OSError where the folder cannot be written to."""
    write_whole(study.folder / names.REPORT, study_html(study))


def study_html(study: Study) -> str:
    """The report as one page."""
    plan = study.plan
    asked = {"recipe": plan.recipe, "vary": plan.vary, **plan.config.model_dump(), **plan.train}
    body = [
        f"<section><h2>{html.escape(study_table.heading(plan))}</h2>{study_view.table_html(study)}{study_view.notes_html(study)}</section>",
        f'<section><h2>Charts</h2><div id="charts" role="img" aria-label="{html.escape(study.describe())}"></div></section>',
        f"<section><h2>Parts of a step</h2><pre>{html.escape(str(study))}</pre></section>",
        f"<section><h2>What was asked for</h2>{table((), asked.items())}</section>",
        f"<section><h2>Where it was measured</h2>{table((), study.environment.items())}</section>",
    ]
    return page(
        title=f"{plan.title} {study.folder.name}",
        heading=f"{html.escape(plan.recipe)} <small>{html.escape(study.folder.name)}</small>",
        headline=study.describe(),
        body="".join(body),
        figures=[study_view.plotly_figure(study)],
    )
