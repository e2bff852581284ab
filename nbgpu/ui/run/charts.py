"""The curves of a run as a Plotly figure in plain JSON, and as an SVG picture of each chart.

Backgrounds are transparent, and text is a grey that is readable on white and on JupyterLab's dark page,
because a picture in a notebook may be shown on either.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from nbgpu.protocol.records import HIGH, LOW, Event, RunInfo, ends_an_interval, is_learning_rate
from nbgpu.text.html import as_image
from nbgpu.text.palette import TEXT_COLOR, rank_color
from nbgpu.ui.run.history import History, Series
from nbgpu.ui.run.smoothing import smoothed
from nbgpu.ui.run.system_charts import SYSTEM_CHARTS, SystemChart
from nbgpu.ui.run.wording import readable

MAX_POINTS = 1200
"""The most points of a curve in a picture: about two for each column of pixels."""
MAX_SMOOTHED_POINTS = 400
"""The most points of a smoothed curve, which has no spikes."""

RAW_OPACITY = 0.75
"""The opacity of raw lines, which are thin: fainter ones could not be seen on a dark page."""

_INTERVAL_NOTE = "Between the dashed lines is its 95 % interval over the held-out cases."
_ROW_PX = 250
_ROW_GAP_PX = 80
_BOTTOM_PX = 45
_NOTE_WIDTH = 64
_INCHES = (3.3, 2.3)
FONT_PT = 9
_PICTURE_NOTE_WIDTH = 40
_NOTE_PT = 8
_NOTE_LINE_PT = 10
_PICTURE_STYLE = "flex:1 1 302px;min-width:0;max-width:400px"
"""The widths of a picture in the page, by which two pictures fit side by side into a notebook's output of 617
pixels. At the least width the letters are 11 pixels high."""

_SYMBOLS = {"checkpoint": "◆", "paused": "‖", "failure": "✕", "failed": "✕", "nonfinite": "▲", "note": "●"}

_NOT_FROM_RECIPE = frozenset(
    {"loss", "compute_s", "utilization_lost_percent"}
    | {line[0] for chart in SYSTEM_CHARTS for line in chart.lines}
)
"""The series that a recipe does not name itself. All others get a chart each."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    rank: int | None
    """None for a number that all ranks share."""
    label: str
    x: list[float]
    y: list[float]
    style: str
    """The style of the line: 'raw' (thin), 'bold', 'solid', 'dash' or 'dot'."""
    smoothed: list[float] | None = None
    """For a raw curve that has a smoothed one: the values of that one at the same points."""


@dataclass(frozen=True)
class Chart:
    """One chart: a title with the unit, and its curves."""

    title: str
    """It ends with the unit in brackets, if there is one."""
    curves: list[Curve]
    note: str = ""
    """A sentence that keeps the chart from being misread; usually empty."""
    from_zero: bool = False
    is_simulated: bool = False
    """Whether a simulated link changes what is drawn."""


def _curve(rank: int | None, label: str, series: Series, style: str, scale: float = 1.0) -> Curve:
    thin = series.thinned(MAX_SMOOTHED_POINTS if style == "bold" else MAX_POINTS, over_time=False)
    return Curve(rank, label, [float(s) for s in thin.steps], [v * scale for v in thin.values], style)


def _raw_and_smoothed(rank: int, series: Series, max_points: int = MAX_POINTS) -> list[Curve]:
    """Return two curves of a series: the raw one and the smoothed one. The raw one has the smoothed values
    too, for the text at the pointer."""
    smooth = Series(series.times_s, series.steps, smoothed(series.values))
    smooth_at_step = dict(zip(smooth.steps, smooth.values, strict=True))
    raw = _curve(rank, f"rank {rank}", series.thinned(max_points, over_time=False), "raw")
    return [
        replace(raw, smoothed=[smooth_at_step[round(step)] for step in raw.x]),
        _curve(rank, f"rank {rank}, smoothed", smooth, "bold"),
    ]


def _losses(history: History, why_losses_differ: str) -> list[Chart]:
    """Return one chart of the training loss and the validation loss, or a chart of each if the two are not
    comparable."""
    training = _curves_by_rank(history, "loss")
    validation = _shared_curve(history, "val_loss", "validation", "dot")
    if not why_losses_differ:
        return [Chart("Loss", training + validation)]
    return [Chart("Loss", training), Chart("Validation loss", validation, why_losses_differ)]


def _validation(history: History) -> list[Chart]:
    """Return a chart of each validation value other than the loss, with the ends of its interval if it has
    one."""
    names = {n for _, n in history.series if n.startswith("val_") and n != "val_loss"}
    drawn = []
    for name in sorted(name for name in names if not ends_an_interval(name, names)):
        ends = [f"{name}{end}" for end in (LOW, HIGH) if f"{name}{end}" in names]
        curves = _shared_curve(history, name, "validation", "dot")
        for end in ends:
            curves += _shared_curve(history, end, "95 % interval", "dash")
        drawn.append(Chart(f"Validation: {readable(name)}", curves, _INTERVAL_NOTE if ends else ""))
    return drawn


def _shared_curve(history: History, name: str, label: str, style: str) -> list[Curve]:
    """The curve of a number that all ranks share, as a list; an empty list if it was not recorded."""
    return [_curve(None, label, series, style) for series in history.ranks_of(name).values()][:1]


def _curves_by_rank(history: History, name: str, max_points: int = MAX_POINTS) -> list[Curve]:
    """The raw and the smoothed curve of a number for each rank."""
    by_rank = history.ranks_of(name)
    return [curve for rank in by_rank for curve in _raw_and_smoothed(rank, by_rank[rank], max_points)]


def _others(history: History) -> list[Chart]:
    """Return a chart of each number that the recipe records beside the loss, such as a term of it. Their
    scales differ. There may be many of these charts, so that each curve has as few points as a smoothed
    one."""
    names = {n for _, n in history.series if not n.startswith("val_") and not is_learning_rate(n)}
    return [
        Chart(readable(name), _curves_by_rank(history, name, MAX_SMOOTHED_POINTS))
        for name in sorted(names - _NOT_FROM_RECIPE)
    ]


def _system_chart(history: History, chart: SystemChart) -> Chart:
    """Return a chart of what nbgpu measures, with a curve for each line and rank, in the charted unit."""
    curves = [
        _curve(rank, ", ".join([f"rank {rank}", *label]), series, style, 1 / chart.divisor)
        for name, style, *label in chart.lines
        for rank, series in history.ranks_of(name).items()
    ]
    title = f"{chart.title} ({chart.unit})" if chart.unit else chart.title
    return Chart(title, curves, from_zero=True, is_simulated=chart.is_simulated)


def charts(history: History, why_losses_differ: str = "") -> list[Chart]:
    """The charts that have data, over the optimizer steps.

    Args:
        history: the run's numbers.
        why_losses_differ: the reason why training and validation losses are not comparable; else empty.
    """
    drawn = [
        *_losses(history, why_losses_differ),
        *_validation(history),
        *(_system_chart(history, chart) for chart in SYSTEM_CHARTS if chart.in_report),
        *_others(history),
    ]
    return [chart for chart in drawn if chart.curves]


GRID_COLOR = "rgba(128, 128, 128, 0.25)"
PLOTLY_AXIS = {"gridcolor": GRID_COLOR, "zeroline": False, "linecolor": GRID_COLOR, "automargin": True}
PLOTLY_CONFIG = {"responsive": True, "displaylogo": False}


def plotly_layout(height: float, above: float, below: float) -> dict[str, Any]:
    """The part of the layout that the Plotly figures of runs, sweeps and studies have in common.

    Args:
        height: of the whole figure, in pixels.
        above, below: the margins.
    """
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": TEXT_COLOR, "size": 12},
        "margin": {"l": 60, "r": 20, "t": above, "b": below},
    }


def plotly_title(text: str, x: float, y: float) -> dict[str, Any]:
    """The title of one of several charts in a figure, as an annotation above the point (x, y), in shares of
    the plot's width and height."""
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "align": "left",
        "yanchor": "bottom",
        "showarrow": False,
    }


_WIDTH = {"raw": 1.0, "bold": 2.5, "solid": 1.8, "dash": 1.5, "dot": 2.0}


def _full_title(chart: Chart, info: RunInfo) -> str:
    """The title of a chart, with the simulated link if that affects the values."""
    return f"{chart.title}, {info.simulated}" if info.simulated and chart.is_simulated else chart.title


def _y_title(chart: Chart) -> str:
    """The title of a chart's y axis: the unit at the end of the chart's title, or else that title itself."""
    unit = re.search(r"\((.+)\)$", chart.title)
    return unit[1] if unit else chart.title[0].lower() + chart.title[1:]


def max_step(drawn: Sequence[Chart]) -> float:
    """The last step of all curves; 1 if there is none."""
    return max((curve.x[-1] for chart in drawn for curve in chart.curves if curve.x), default=1.0) or 1.0


def _rounded(values: list[float]) -> list[float | None]:
    """Round to five digits, which are more than a screen shows. NaN and infinity, which JSON lacks, become
    None, for which Plotly leaves a gap."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]


def plotly_figure(
    info: RunInfo, history: History, drawn: Sequence[Chart], last_step: float | None = None
) -> dict[str, Any]:
    """Return charts, two in a row, as a dict of the type `application/vnd.plotly.v1+json`.

    Args:
        info, history: the run and its numbers.
        drawn: some of the charts that `charts` returned.
        last_step: the end of their x axes; None for the last step of these charts.
    """
    # Heights of the rows and of the gaps between them are shares of the plot's height.
    num_rows = max(math.ceil(len(drawn) / 2), 1)
    plot_px = _ROW_PX * num_rows
    gap = _ROW_GAP_PX / plot_px if num_rows > 1 else 0.0
    height = (1 - gap * (num_rows - 1)) / num_rows
    num_note_lines = max((len(wrap(chart.note, _NOTE_WIDTH)) for chart in drawn[:2]), default=0)
    top_px = 60 + 16 * num_note_lines
    layout: dict[str, Any] = {
        **plotly_layout(plot_px + top_px + _BOTTOM_PX, top_px, _BOTTOM_PX),
        # Right above the title of the first row, however many rows there are.
        "legend": {"orientation": "h", "x": 0, "y": 1 + (top_px - 38) / plot_px, "yanchor": "bottom"},
        "hovermode": "x",
        "annotations": [],
        "shapes": [],
    }
    data: list[dict[str, Any]] = []
    in_legend: set[int | None] = set()
    last_step = last_step or max_step(drawn)
    columns = ((0.0, 0.46), (0.54, 1.0)) if len(drawn) > 1 else ((0.0, 1.0),)
    for i, chart in enumerate(drawn):
        # Plotly numbers axes from 'x' and 'y' on: 'x2', 'y2' and so on.
        suffix = str(i + 1) if i else ""
        left, right = columns[i % 2]
        top = 1 - i // 2 * (height + gap)
        layout[f"xaxis{suffix}"] = {
            **PLOTLY_AXIS,
            "domain": [left, right],
            # All charts have the same range. By default, Plotly leaves room at the ends if there are markers.
            "range": [0, last_step],
            "anchor": f"y{suffix}",
            "title": {"text": "step", "standoff": 4, "font": {"size": 11}},
        }
        layout[f"yaxis{suffix}"] = {
            **PLOTLY_AXIS,
            "domain": [max(top - height, 0.0), top],
            "anchor": f"x{suffix}",
            "title": {"text": _y_title(chart), "standoff": 4, "font": {"size": 11}},
        }
        if chart.from_zero:
            layout[f"yaxis{suffix}"]["rangemode"] = "tozero"
        note = [f"<i>{line}</i>" for line in wrap(chart.note, _NOTE_WIDTH)]
        title = "<br>".join([f"<b>{_full_title(chart, info)}</b>", *note])
        layout["annotations"].append({**plotly_title(title, left, top), "font": {"size": 13}})
        for mark in history.marks:
            layout["shapes"].append(_mark_line(mark, suffix))
            layout["annotations"].append(_mark_symbol(mark, suffix))
        for curve in chart.curves:
            shows_legend = curve.style != "raw" and curve.rank not in in_legend
            if shows_legend:
                in_legend.add(curve.rank)
            data.append(_trace(curve, suffix, shows_legend))
    layout["meta"] = {"run_id": info.run_id, "recipe": info.recipe}
    return {"data": data, "layout": layout, "config": PLOTLY_CONFIG}


def _trace(curve: Curve, suffix: str, shows_legend: bool) -> dict[str, Any]:
    """Return a curve as a trace of Plotly.

    Args:
        curve: the curve.
        suffix: the number of the chart's axes in their names; empty for the first chart.
        shows_legend: whether the curve stands for its rank in the legend.
    """
    is_raw = curve.style == "raw"
    has_dots = len(curve.x) == 1 or curve.style == "dot"
    # The text of the raw line at the pointer names the smoothed value too.
    hover: dict[str, Any] = {"hoverinfo": "skip"}
    if curve.style != "bold":
        smoothed_text = ", smoothed %{customdata:.4g}" if is_raw else ""
        text = f"step %{{x}}, {curve.label}: %{{y:.4g}}{smoothed_text}<extra></extra>"
        hover = {"hovertemplate": text}
    if curve.smoothed is not None:
        hover["customdata"] = _rounded(curve.smoothed)
    return {
        "type": "scatter",
        "mode": "lines+markers" if has_dots or is_raw else "lines",
        "name": _name(curve.rank),
        "legendgroup": _name(curve.rank),
        "showlegend": shows_legend,
        **hover,
        "opacity": RAW_OPACITY if is_raw else 1.0,
        "x": curve.x,
        "y": _rounded(curve.y),
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "cliponaxis": not (has_dots or is_raw),
        # The newest raw value has a dot, because the smoothed line would hide it.
        "marker": {"size": [0] * (len(curve.x) - 1) + [6] if is_raw and not has_dots else 5},
        "line": {
            "color": _color(curve.rank),
            "width": _WIDTH[curve.style],
            "dash": curve.style if curve.style in ("dash", "dot") else "solid",
        },
    }


def _mark_color(mark: Event) -> str:
    return "#d1521f" if mark.kind in ("failure", "nonfinite") or mark.text == "failed" else TEXT_COLOR


def _mark_line(mark: Event, suffix: str) -> dict[str, Any]:
    """Return a vertical line at the step of an event, as a shape of Plotly's layout."""
    return {
        "type": "line",
        "xref": f"x{suffix}",
        "yref": f"y{suffix} domain",
        "x0": mark.step,
        "x1": mark.step,
        "y0": 0,
        "y1": 1,
        "line": {"color": _mark_color(mark), "width": 1, "dash": "dot"},
    }


def _mark_symbol(mark: Event, suffix: str) -> dict[str, Any]:
    """Return the symbol of an event at the upper end of its line, as an annotation with the event's text at
    the pointer."""
    name = mark.text if mark.kind == "state" else mark.kind
    return {
        "text": _SYMBOLS.get(name, "●"),
        "hovertext": f"{name}: {mark.text}",
        "x": mark.step,
        "y": 1,
        "xref": f"x{suffix}",
        "yref": f"y{suffix} domain",
        "yanchor": "top",
        "showarrow": False,
        "font": {"size": 11, "color": _mark_color(mark)},
    }


_MPL_DASH = {"dash": "--", "dot": ":"}


def pictures(info: RunInfo, history: History, drawn: Sequence[Chart]) -> str:
    """Return the charts as HTML for a notebook: a legend with the colours of the ranks, and below it the
    pictures, as many side by side as the page has room for."""
    ranks = {curve.rank for chart in drawn for curve in chart.curves}
    legend = "&emsp;".join(
        f'<span style="color:{_color(rank)}">■</span> {_name(rank)}'
        for rank in sorted(ranks, key=lambda rank: math.inf if rank is None else rank)
    )
    last_step = max_step(drawn)
    images = "".join(as_image(_svg(info, history, chart, last_step), _PICTURE_STYLE) for chart in drawn)
    titles = html.escape(", ".join(chart.title for chart in drawn))
    return (
        f'<div>{legend}</div><div role="img" aria-label="Charts of the run: {titles}" '
        f'style="display:flex;flex-wrap:wrap;gap:8px">{images}</div>'
    )


def _svg(info: RunInfo, history: History, chart: Chart, last_step: float) -> str:
    """Draw one chart with matplotlib, and return it as an SVG element for pages that cannot draw Plotly."""
    figure, axes = new_figure(_INCHES)
    for curve in chart.curves:
        axes.plot(
            curve.x,
            curve.y,
            _MPL_DASH.get(curve.style, "-"),
            color=_color(curve.rank),
            alpha=RAW_OPACITY if curve.style == "raw" else 1.0,
            linewidth=_WIDTH[curve.style] * 0.8,
            marker="." if len(curve.x) == 1 or curve.style in ("dot", "raw") else None,
            markevery=[-1] if curve.style == "raw" else None,
        )
    for mark in history.marks:
        axes.axvline(mark.step, color=TEXT_COLOR, linewidth=0.8, linestyle=":")
    # The newest point stays clear of the edge.
    axes.set_xlim(0, 1.01 * last_step)
    title = _full_title(chart, info)
    note = wrap(chart.note, _PICTURE_NOTE_WIDTH)
    style_axes(axes, title, chart.from_zero, y_title=_y_title(chart), num_lines_below_title=len(note))
    # The letters are small, because text that is wider than the picture is cut off.
    annotation = axes.annotate("\n".join(note), (0, 1), (0, 4), "axes fraction", "offset points", va="bottom")
    annotation.set(color=TEXT_COLOR, fontsize=_NOTE_PT)
    return svg_element(figure, f"{title}, run {info.run_id}")


def _color(rank: int | None) -> str:
    return TEXT_COLOR if rank is None else rank_color(rank)


def _name(rank: int | None) -> str:
    return "validation" if rank is None else f"rank {rank}"


def new_figure(inches: tuple[float, float]) -> tuple[Figure, Axes]:
    """A figure with one chart on a transparent background; `inches` is (width, height)."""
    figure = Figure(figsize=inches, layout="constrained")
    figure.patch.set_alpha(0)
    return figure, figure.add_subplot()


def style_axes(
    axes: Axes,
    title: str,
    from_zero: bool = True,
    x_title: str = "step",
    y_title: str = "",
    num_lines_below_title: int = 0,
) -> None:
    """Give a chart the same style as all others, with room below its title for the lines of a note."""
    axes.patch.set_alpha(0)
    pad_pt = 6 + num_lines_below_title * _NOTE_LINE_PT
    axes.set_title(title, loc="left", color=TEXT_COLOR, fontsize=11, pad=pad_pt)
    axes.set_xlabel(x_title, color=TEXT_COLOR, fontsize=FONT_PT)
    axes.set_ylabel(y_title, color=TEXT_COLOR, fontsize=FONT_PT)
    axes.tick_params(colors=TEXT_COLOR, labelsize=FONT_PT)
    axes.grid(visible=True, color="#808080", alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(TEXT_COLOR)
    if from_zero:
        axes.set_ylim(bottom=0)


def svg_element(figure: Figure, title: str) -> str:
    """A matplotlib figure as an SVG element that fills the width of its parent in a page. Its text stays
    text."""
    FigureCanvasSVG(figure)
    # The type of fonts is a global setting of matplotlib. Only this one is restored, because a cell may
    # change others while this runs on a thread.
    fonttype = mpl.rcParams["svg.fonttype"]
    mpl.rcParams["svg.fonttype"] = "none"
    try:
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Title": title, "Date": None})
    finally:
        mpl.rcParams["svg.fonttype"] = fonttype
    # A page needs no XML declaration, which stands before the element.
    picture = file.getvalue()[file.getvalue().index("<svg") :]
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg \1width="100%"', picture, count=1)
