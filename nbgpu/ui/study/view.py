"""The view of a study: its charts and its table, as elements of a page."""

from __future__ import annotations

import html
from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure

from nbgpu.client.scaling import study_table
from nbgpu.client.scaling.study_table import PARTS
from nbgpu.performance.study_results import Gap
from nbgpu.text.palette import KIND_COLORS, RANK_COLORS, TEXT_COLOR
from nbgpu.ui.run.charts import (
    FONT_PT,
    PLOTLY_AXIS,
    PLOTLY_CONFIG,
    new_figure,
    plotly_layout,
    plotly_title,
    style_axes,
    svg_element,
)
from nbgpu.ui.run.html_parts import followed_page
from nbgpu.ui.study.chart import Studied, StudyChart
from nbgpu.ui.study.chart import chart as chart

_COLORS = {name: KIND_COLORS[name.removesuffix("_s")] for name in PARTS}
"""The colours of the same parts in a timeline."""
_MEASURED = RANK_COLORS[0]
_TITLE_WIDTH = 56
"""The longest line of a title in characters; a longer one would reach over the other chart."""
_PICTURE_TITLE_WIDTH = 42
_INCHES = (4.3, 3.6)


def svg(study: Studied) -> str:
    """The charts as SVG elements, which a narrow page shows one below the other; empty before there is a
    measured point."""
    drawn = chart(study)
    if not drawn.x:
        return ""
    return _draw_measured(drawn) + (_draw_parts(drawn) if drawn.parts_ms else "")


def _draw_measured(drawn: StudyChart) -> str:
    """Draw the measured values with their intervals, and the ideal ones as a dotted line."""
    figure, axes = new_figure(_INCHES)
    if drawn.ideal:
        axes.plot(drawn.x, drawn.ideal, ":", color=TEXT_COLOR, linewidth=1.2, label="ideal")
    line = "" if _has_names(drawn) else "-"
    style: dict[str, Any] = {"color": _MEASURED, "marker": "o", "linestyle": line, "capsize": 3}
    axes.errorbar(drawn.x, drawn.y, yerr=_distances(drawn), label="measured, 95 %", **style)
    _style(axes, drawn.title, drawn.x_title, drawn.y_title)
    axes.set_ylim(bottom=0)
    if drawn.ticks:
        axes.set_xscale("log")
        axes.set_xticks(list(drawn.x), list(drawn.ticks))
        axes.set_xticks([], minor=True)
    if drawn.is_by_size:
        for place, y, name in zip(drawn.x, drawn.y, drawn.names, strict=True):
            axes.annotate(
                name,
                (place, y),
                (0, 6),
                textcoords="offset points",
                color=TEXT_COLOR,
                fontsize=FONT_PT,
                ha="center",
                parse_math=False,
            )
    elif drawn.ideal:
        axes.set_xticks(list(drawn.x))
    return _picture(figure, drawn.title)


def _has_names(drawn: StudyChart) -> bool:
    """Whether x has names, between which a line would mean nothing."""
    return any(isinstance(value, str) for value in drawn.x)


def _distances(drawn: StudyChart) -> tuple[list[float], list[float]]:
    """The distances from each point to the low and to the high end of its interval. Rounding may give
    distances below zero, which matplotlib refuses."""
    points = list(zip(drawn.y, drawn.between, strict=True))
    return [max(0.0, y - low) for y, (low, _) in points], [max(0.0, high - y) for y, (_, high) in points]


def _draw_parts(drawn: StudyChart) -> str:
    """Draw the parts of a step as stacked bars, one bar for each point."""
    figure, axes = new_figure(_INCHES)
    positions = list(range(len(drawn.x)))
    bottoms = [0.0] * len(positions)
    for name, heights in drawn.parts_ms.items():
        axes.bar(positions, heights, bottom=bottoms, color=_COLORS[name], label=PARTS[name], width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(positions, drawn.names)
    _style(axes, drawn.parts_title, drawn.parts_x_title, "time of a step, ms")
    return _picture(figure, drawn.parts_title)


def _picture(figure: Figure, title: str) -> str:
    # The legend is below the chart, because bars and lines leave no room in it.
    style: dict[str, Any] = {"frameon": False, "fontsize": FONT_PT, "ncols": 2, "labelcolor": TEXT_COLOR}
    figure.legend(loc="outside lower center", **style)
    return svg_element(figure, title)


def _style(axes: Any, title: str, x_title: str, y_title: str) -> None:
    style_axes(axes, "\n".join(wrap(title, _PICTURE_TITLE_WIDTH)), x_title=x_title, y_title=y_title)


def plotly_figure(study: Studied) -> dict[str, Any]:
    """The charts as Plotly draws them."""
    drawn = chart(study)
    data: list[dict[str, Any]] = []
    if drawn.ideal:
        ideal = {"mode": "lines", "line": {"color": TEXT_COLOR, "dash": "dot"}, "name": "ideal"}
        data.append({"type": "scatter", "x": list(drawn.x), "y": list(drawn.ideal), **ideal})
    below, above = _distances(drawn)
    mode = "markers" if _has_names(drawn) else "lines+markers"
    data.append(
        {
            "type": "scatter",
            "mode": "lines+markers+text" if drawn.is_by_size else mode,
            "name": "measured, with 95 % intervals",
            "x": list(drawn.x),
            "y": list(drawn.y),
            "error_y": {"type": "data", "symmetric": False, "array": above, "arrayminus": below},
            "line": {"color": _MEASURED},
            "text": list(drawn.names),
            "textposition": "top center",
        }
    )
    data += [
        {
            "type": "bar",
            "name": PARTS[name],
            "x": list(drawn.names),
            "y": milliseconds,
            "marker": {"color": _COLORS[name]},
            "xaxis": "x2",
            "yaxis": "y2",
        }
        for name, milliseconds in drawn.parts_ms.items()
    ]
    axis = PLOTLY_AXIS
    titles = [(0.0, drawn.title), (0.56, drawn.parts_title)]
    logarithmic = {"type": "log", "tickvals": list(drawn.x), "ticktext": list(drawn.ticks)}
    return {
        "data": data,
        "layout": {
            **plotly_layout(460, above=60, below=110),
            "barmode": "stack",
            "annotations": [
                plotly_title("<br>".join(wrap(text, _TITLE_WIDTH)), x, 1.02) for x, text in titles
            ],
            "xaxis": {
                **axis,
                "domain": [0, 0.48],
                "title": {"text": drawn.x_title},
                **(logarithmic if drawn.ticks else {}),
            },
            "yaxis": {**axis, "title": {"text": drawn.y_title}, "rangemode": "tozero"},
            "xaxis2": {
                **axis,
                "domain": [0.56, 1],
                "anchor": "y2",
                "type": "category",
                "title": {"text": drawn.parts_x_title},
            },
            "yaxis2": {**axis, "anchor": "x2", "title": {"text": "time of a step, ms"}},
            # At the bottom edge of the figure: relative to the plot, the legend would cover the axis titles.
            "legend": {"orientation": "h", "y": 0, "yref": "container", "yanchor": "bottom"},
        },
        "config": PLOTLY_CONFIG,
    }


def page(study: Studied, picture: str) -> str:
    """The whole view as HTML: a line about the progress, the charts and the table.

    Args:
        study: the study to show.
        picture: the charts, as returned by `svg`.
    """
    shown, notes = table_html(study), notes_html(study)
    return followed_page(
        "study", study.describe(), "Charts of the study", picture, shown, study.folder, notes
    )


def table_html(study: Studied) -> str:
    """The table of the points."""
    summary = study.summary()
    header, rows = study_table.header_and_rows(study.plan, summary)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = []
    for point, row in zip(summary, rows, strict=True):
        first, *others = map(html.escape, row)
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        has_failed = isinstance(point, Gap) and point.why
        marked = ' class="nbgpu-study-gap"' if has_failed else ""
        body.append(f'<tr{marked}><th scope="row">{first}</th>{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def notes_html(study: Studied) -> str:
    """Return the sentences below the table as a list; empty if there are none."""
    notes = study_table.notes(study.plan, study.summary())
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def text(study: Studied) -> str:
    """The whole view as plain text."""
    return str(study)
