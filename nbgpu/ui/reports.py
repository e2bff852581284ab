"""The reports of sweeps and studies: `report.html` in their folders, which opens with no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbgpu.client.scaling import study_table
from nbgpu.machine.files import write_whole
from nbgpu.run_folder import names
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.run.html_parts import escape, table
from nbgpu.ui.run.snapshot import page, section
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
    failures = _failures(sweep)
    body = [
        f"<style>{_CSS}</style>",
        section(
            "Trials, the best first", sweep_view.table_html(columns(sweep), rows(sweep, sweep.ranking()))
        ),
        section("Curves", f'<div id="charts" role="img" aria-label="{escape(headline)}"></div>'),
        section("Failures", failures) if failures else "",
        section("Settings that all trials share", table((), sweep.plan.shared.items())),
    ]
    return page(
        title=f"{sweep.plan.recipe} {sweep.folder.name}",
        heading=f"{escape(sweep.plan.recipe)} <small>{escape(sweep.folder.name)}</small>",
        headline=headline,
        body="".join(body),
        figures=[sweep_view.plotly_figure(sweep)],
    )


def _failures(sweep: Sweep) -> str:
    """The tracebacks of the ranks that failed, as HTML."""
    return "".join(
        f"<p>trial {trial.number} ({escape(trial.label)}), rank {f.rank}: {escape(f.error_type)}: "
        f"{escape(f.message)}</p><pre>{to_html(f.traceback)}</pre>"
        for trial in sweep.trials
        for f in trial.failures()
    )


def write_study(study: Study) -> None:
    """Write the report; OSError where the folder cannot be written to."""
    write_whole(study.folder / names.REPORT, study_html(study))


def study_html(study: Study) -> str:
    """Return the report as one page: the points, the charts, the parts of a step, the settings, and the host
    and versions."""
    plan = study.plan
    headline = study.describe()
    points = study_view.table_html(study) + study_view.notes_html(study)
    settings = {"recipe": plan.recipe, "vary": plan.vary, **plan.config.model_dump(), **plan.train}
    body = [
        section(escape(study_table.heading(plan)), points),
        section("Charts", f'<div id="charts" role="img" aria-label="{escape(headline)}"></div>'),
        section("Parts of a step", f"<pre>{escape(study)}</pre>"),
        section("What was asked for", table((), settings.items())),
        section("Where it was measured", table((), study.environment.items())),
    ]
    return page(
        title=f"{plan.title} {study.folder.name}",
        heading=f"{escape(plan.recipe)} <small>{escape(study.folder.name)}</small>",
        headline=headline,
        body="".join(body),
        figures=[study_view.plotly_figure(study)],
    )
