"""The report of a study: `report.html` in its folder, which opens with no network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

from nbgpu.client.scaling import study_table
from nbgpu.machine.files import write_whole
from nbgpu.run_folder import names
from nbgpu.ui.run.html_parts import table
from nbgpu.ui.run.snapshot import page
from nbgpu.ui.study.view import notes_html, plotly_figure, table_html

if TYPE_CHECKING:
    from nbgpu.client.scaling.study import Study


def write_report(study: Study) -> Path:
    """Write the report; OSError where the folder cannot be written to."""
    path = study.folder / names.REPORT
    write_whole(path, report_html(study))
    return path


def report_html(study: Study) -> str:
    """The report as one page."""
    plan = study.plan
    asked = {"recipe": plan.recipe, "vary": plan.vary, **plan.config.model_dump(), **plan.train}
    body = [
        f"<section><h2>{html.escape(study_table.heading(plan))}</h2>{table_html(study)}{notes_html(study)}</section>",
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
        figures=[plotly_figure(study)],
    )
