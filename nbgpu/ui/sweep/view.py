"""The view of a sweep: a table of its trials, and a chart with a line for each."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nbgpu.client.sweeps.trial import LOSS, Curve
from nbgpu.text.palette import RANK_COLORS, TEXT_COLOR, rank_color
from nbgpu.text.tables import aligned
from nbgpu.ui.run.charts import PLOTLY_AXIS, PLOTLY_CONFIG, new_figure, plotly_layout, style_axes, svg_element
from nbgpu.ui.run.html_parts import followed_page
from nbgpu.ui.run.smoothing import smoothed
from nbgpu.ui.sweep.rows import TrialRow, columns, rows

if TYPE_CHECKING:
    from nbgpu.client.sweeps.sweep import Sweep

MAX_IN_LEGEND = 12

_DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))
"""The names of dash styles in matplotlib and in Plotly, by which trials of the same colour differ."""


@dataclass(frozen=True)
class Line:
    """One trial in the chart."""

    number: int
    label: str
    curve: Curve
    is_best: bool

    @property
    def color(self) -> str:
        return rank_color(self.number)

    @property
    def dash(self) -> tuple[str, str]:
        return _DASHES[self.number // len(RANK_COLORS) % len(_DASHES)]


def chart(sweep: Sweep) -> tuple[str, list[Line]]:
    """Return the chart's title and its lines: the number by which the trials are sorted, or the smoothed loss
    before any trial has recorded that number."""
    sort_by, best = sweep.plan.config.sort_by, sweep.best
    title = sort_by
    curves = {trial: trial.curve(sort_by) for trial in sweep.trials}
    if not any(curve.values for curve in curves.values()):
        title = f"{LOSS}, smoothed; there is no {sort_by} yet"
        curves = {trial: trial.curve(LOSS) for trial in sweep.trials}
        curves = {t: replace(curve, values=smoothed(curve.values)) for t, curve in curves.items()}
    return title, [
        Line(trial.number, f"trial {trial.number}: {trial.label}", curve, trial is best)
        for trial, curve in curves.items()
        if curve.values
    ]


def svg(sweep: Sweep) -> str:
    """The chart as an SVG element; empty before there is anything to draw."""
    title, lines = chart(sweep)
    if not lines:
        return ""
    figure, axes = new_figure((4.8, 3.2))
    for line in lines:
        axes.plot(
            line.curve.steps,
            line.curve.values,
            line.dash[0],
            color=line.color,
            linewidth=2.6 if line.is_best else 1.2,
            marker="." if len(line.curve.steps) < 30 else None,
            label=f"trial {line.number}{', the best' if line.is_best else ''}",
        )
    style_axes(axes, title, from_zero=False)
    if len(lines) <= MAX_IN_LEGEND:
        num_columns = math.ceil(len(lines) / 6)
        axes.legend(frameon=False, fontsize=9, ncols=num_columns, labelcolor=TEXT_COLOR)
    return svg_element(figure, f"{sweep.folder.name}: {title}")


def plotly_figure(sweep: Sweep) -> dict[str, Any]:
    """The chart as Plotly draws it."""
    title, lines = chart(sweep)
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers" if len(line.curve.steps) < 30 else "lines",
                "name": line.label,
                "x": line.curve.steps,
                "y": [value if math.isfinite(value) else None for value in line.curve.values],
                "marker": {"size": 5},
                "line": {"color": line.color, "width": 3 if line.is_best else 1.5, "dash": line.dash[1]},
            }
            for line in lines
        ],
        "layout": {
            **plotly_layout(460, above=40, below=45),
            "title": {"text": title, "x": 0, "font": {"size": 14}},
            "xaxis": {**PLOTLY_AXIS, "title": {"text": "step"}},
            "yaxis": {**PLOTLY_AXIS, "title": {"text": title}},
            "hovermode": "closest",
        },
        "config": PLOTLY_CONFIG,
    }


def page(sweep: Sweep, picture: str) -> str:
    """The whole view as HTML: a line about the progress, the chart and the table.

    Args:
        sweep: the sweep to show.
        picture: the chart, as returned by `svg`.
    """
    trials = sweep.ranking() if sweep.status in ("finished", "stopped", "failed") else sweep.trials
    shown = table_html(columns(sweep), rows(sweep, trials))
    return followed_page("sweep", sweep.describe(), "Chart of the trials", picture, shown, sweep.folder)


def table_html(header: Sequence[str], shown: Sequence[TrialRow]) -> str:
    """Return the table of the trials as HTML. The error of a failed trial is in another row below it."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = []
    for row in shown:
        number, *others = (html.escape(cell) for cell in row.cells)
        chip = f'<span style="color:{row.color}" aria-hidden="true">■</span> '
        best = " (best)" if row.is_best else ""
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        body.append(f'<tr><th scope="row">{chip}{number}{best}</th>{cells}</tr>')
        if row.error:
            body.append(
                f'<tr><td></td><td class="nbgpu-sweep-error" colspan="{len(header) - 1}">{html.escape(row.error)}</td></tr>'
            )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def text(sweep: Sweep) -> str:
    """The whole view as plain text."""
    shown = rows(sweep, sweep.ranking())
    lines = [columns(sweep), *(row.cells for row in shown)]
    errors = [f"trial {row.number}: {row.error}" for row in shown if row.error]
    return "\n".join([sweep.describe(), *aligned(lines), *errors, str(sweep.folder)])
