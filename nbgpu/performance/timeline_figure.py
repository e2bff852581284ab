"""A timeline of all ranks as a Plotly figure, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbgpu.performance.rank_steps import Kind, Span
from nbgpu.text.palette import KIND_COLORS, TEXT_COLOR
from nbgpu.text.sizes import in_words

Steps = Mapping[int, tuple[Sequence[Span], Sequence[Span]]]
"""By step number, the spans of all ranks and the spans of the critical path."""

WORDS: dict[Kind, str] = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "other work",
    "waiting": "waiting for the last rank",
    "transfer": "waiting for the transfer",
    "blocked": "waiting in a collective",
    "exchange": "gradients on their way",
    "collective": "another collective on its way",
}
_HATCHES: dict[Kind, str] = {"waiting": "/", "transfer": ".", "blocked": "x"}
_GRID_COLOR = "rgba(128, 128, 128, 0.25)"
_LANES = ("computation", "exchange", "data")
_GAP = 0.6
"""The gap between the lanes of two ranks, as a share of a lane's height."""
_LANE_PX = 26
_LINE_ABOVE = 0.46
"""How far the line of the critical path is above the middle of a lane, as a share of a lane's height."""
_ABOVE_PX, _BELOW_PX = 70, 115
"""The margins: for the title, and for the x axis with the legend."""


def figure(
    title: str, ranks: Sequence[int], steps: Steps, remarks: Sequence[str], unit: str
) -> dict[str, Any]:
    """Return the figure of the type `application/vnd.plotly.v1+json`; its x axis is in milliseconds.

    Args:
        title: the run or cell.
        ranks: the numbers of the ranks.
        steps: at least one.
        remarks: sentences for the subtitle, such as on the ranks' clocks.
        unit: 'step' or 'cell'.
    """
    zero_s = min(span.begin_s for spans, _ in steps.values() for span in spans)
    names = f"{unit} {min(steps)}" if len(steps) == 1 else f"{unit}s {min(steps)} to {max(steps)}"
    data = [_bars(kind, steps, zero_s, unit) for kind in WORDS]
    data = [trace for trace in data if trace["x"]]
    if any(path for _, path in steps.values()):
        data.append(_path(steps, zero_s))
    lanes = [(rank, lane) for rank in ranks for lane in range(len(_LANES))]
    # A vertical line at the beginning of each step.
    begins = {step: min(span.begin_s for span in spans) for step, (spans, _) in steps.items()}
    layout: dict[str, Any] = {
        "title": {"text": f"{title}, {names}<br><sup>{'; '.join(['measured', *remarks])}</sup>"},
        "barmode": "overlay",
        "bargap": 0,
        "height": _ABOVE_PX + _LANE_PX * len(lanes) + _BELOW_PX,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": TEXT_COLOR},
        "margin": {"l": 130, "r": 20, "t": _ABOVE_PX, "b": _BELOW_PX},
        "legend": {"orientation": "h", "y": 0, "yref": "container", "yanchor": "bottom"},
        "xaxis": {"title": {"text": "time, ms"}, "gridcolor": _GRID_COLOR, "zeroline": False},
        "yaxis": {
            "tickvals": [_y(rank, lane) for rank, lane in lanes],
            "ticktext": [f"rank {rank}, computation" if lane == 0 else _LANES[lane] for rank, lane in lanes],
            "title": {"text": "rank, and what it does", "standoff": 8},
            "automargin": True,
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
        "shapes": [
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
            | {"line": {"color": _GRID_COLOR, "width": 2}}
            for x in (_ms(begin_s - zero_s) for begin_s in begins.values())
        ],
        "annotations": [
            {"text": f"{unit} {step}", "x": _ms(begin_s - zero_s), "y": 1, "yref": "paper"}
            | {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
            for step, begin_s in begins.items()
        ],
    }
    return {"data": data, "layout": layout, "config": {"responsive": True, "scrollZoom": True}}


def _bars(kind: Kind, steps: Steps, zero_s: float, unit: str) -> dict[str, Any]:
    """Return Plotly's trace of all spans of one kind: a horizontal bar for each, in the lane of its rank."""
    chosen = [(step, span) for step, (spans, _) in steps.items() for span in spans if span.kind == kind]
    color = KIND_COLORS[kind]
    marker: dict[str, Any] = {"color": color, "line": {"width": 0}}
    if kind in _HATCHES:
        # Hatching marks the spans in which a rank computes nothing, also for readers who see no colours.
        marker = {
            "color": "rgba(0,0,0,0)",
            "line": {"color": color, "width": 1},
            "pattern": {"shape": _HATCHES[kind], "fgcolor": color, "size": 6},
        }
    return {
        "type": "bar",
        "orientation": "h",
        "name": WORDS[kind],
        "base": [_ms(span.begin_s - zero_s) for _, span in chosen],
        "x": [_ms(span.end_s - span.begin_s) for _, span in chosen],
        "y": [_y(span.rank, _lane(kind)) for _, span in chosen],
        "width": 0.8,
        # The bars of transfers may overlap, so they are translucent.
        "opacity": 0.6 if kind in ("exchange", "collective") else 1.0,
        "marker": marker,
        "text": [_label(span) for _, span in chosen],
        "textposition": "none",
        "customdata": [[step, span.rank] for step, span in chosen],
        "hovertemplate": f"{WORDS[kind]}, %{{x:.3f}} ms, from %{{base:.3f}} ms %{{text}}"
        f"<br>{unit} %{{customdata[0]}}, rank %{{customdata[1]}}<extra></extra>",
    }


def _path(steps: Steps, zero_s: float) -> dict[str, Any]:
    """Return Plotly's trace of the critical paths as one line, with gaps where steps are not drawn. A
    transfer is drawn from the previous rank of the path to the rank on which the path continues."""
    x: list[float | None] = []
    y: list[float | None] = []
    previous_y = None
    for step, (_, path) in steps.items():
        if step - 1 not in steps:
            previous_y = None
        for span in path:
            span_y = _y(span.rank, _lane(span.kind)) + _LINE_ABOVE
            x += [_ms(span.begin_s - zero_s), _ms(span.end_s - zero_s)]
            y += [previous_y if span.kind == "transfer" and previous_y is not None else span_y, span_y]
            previous_y = span_y
        if step + 1 not in steps:
            # Plotly breaks a line at None.
            x.append(None)
            y.append(None)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "critical path",
        "x": x,
        "y": y,
        "line": {"color": TEXT_COLOR, "width": 3},
        "hoverinfo": "skip",
    }


def _lane(kind: Kind) -> int:
    """Return the index in _LANES for a kind of span."""
    return {"exchange": 1, "collective": 1, "data": 2}.get(kind, 0)


def _label(span: Span) -> str:
    """Return the operation and the size of a span, such as 'all_reduce 1.0 MiB'."""
    return " ".join(filter(None, [span.name, in_words(span.num_bytes) if span.num_bytes else ""]))


def _y(rank: int, lane: int) -> float:
    """Return the y coordinate of the middle of a rank's lane; rank 0 is at the top."""
    return -(rank * (len(_LANES) + _GAP) + lane)


def _ms(seconds: float) -> float:
    """Convert to milliseconds, rounded to a tenth of a microsecond, which is below the clock's precision."""
    return round(1e3 * seconds, 4)
