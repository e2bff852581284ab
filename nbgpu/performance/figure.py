"""The picture of a modelled speed-up: what was measured, and what is modelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbgpu.performance.laws import Estimate, Law
from nbgpu.text.palette import RANK_COLORS

_MODEL, _LAW = RANK_COLORS[:2]
_GREY = "#7b7b7b"
_GRID = "rgba(128, 128, 128, 0.25)"
_BAND = 0.15
_ABOVE_PX, _PLOT_PX = 40, 340
_AXIS_PX = 60
"""The room that the numbers and the name of the x axis take."""
_LEGEND_LINE_PX = 19


@dataclass(frozen=True)
class Points:
    """The modelled speed-up of a number of ranks."""

    ranks: int
    speedup: float
    between: tuple[float, float]
    is_beyond: bool
    """Whether it lies beyond what was measured."""


@dataclass(frozen=True)
class _Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dash: str
    """As Plotly calls it; '' for points without a line."""
    color: str
    symbol: str = ""
    errors: tuple[Sequence[float], Sequence[float]] | None = None
    """Below and above the values."""


class Picture:
    """A figure, for Plotly where a page has it, and else as text.

    Attributes:
        figure: as Plotly takes it.
    """

    def __init__(self, figure: dict[str, Any], text: str) -> None:
        self.figure = figure
        self._text = text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.plotly.v1+json": self.figure, "text/plain": self._text}

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def picture(
    title: str,
    modelled: Sequence[Points],
    measured: Mapping[int, Estimate],
    laws: Sequence[Law],
) -> Picture:
    """Draw speed-ups over the number of ranks, both in logarithmic scale.

    Args:
        title: begins with 'modelled'.
        modelled: by rising number of ranks.
        measured: points with intervals.
        laws: lines, in another style beyond the ranks that they were fitted to.
    """
    lines = list(_lines(modelled, measured, laws))
    band = {
        "type": "scatter",
        "mode": "lines",
        "name": "modelled, interval",
        "x": [*(p.ranks for p in modelled), *(p.ranks for p in reversed(modelled))],
        "y": [*(p.between[1] for p in modelled), *(p.between[0] for p in reversed(modelled))],
        "fill": "toself",
        "fillcolor": _transparent(_MODEL),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    below_px = _AXIS_PX + _LEGEND_LINE_PX * (1 + len(lines))
    axis = {"type": "log", "gridcolor": _GRID, "zeroline": False, "automargin": True}
    figure = {
        "data": [band, *map(_trace, lines)],
        "layout": {
            "height": _ABOVE_PX + _PLOT_PX + below_px,
            "autosize": True,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": _GREY, "size": 12},
            "margin": {"l": 60, "r": 20, "t": _ABOVE_PX, "b": below_px},
            "title": {"text": title, "x": 0, "font": {"size": 14}},
            "xaxis": {**axis, "title": {"text": "ranks"}, "tickvals": sorted({p.ranks for p in modelled})},
            "yaxis": {**axis, "title": {"text": "speed-up in samples per second"}, "dtick": "D2"},
            "legend": {"x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        },
        "config": {"responsive": True, "displaylogo": False},
    }
    return Picture(figure, "\n".join([title, *map(_in_words, lines)]))


def _lines(
    modelled: Sequence[Points],
    measured: Mapping[int, Estimate],
    laws: Sequence[Law],
) -> Iterator[_Line]:
    ranks = [point.ranks for point in modelled]
    yield _Line("ideal", ranks, ranks, "longdash", _GREY)
    within = [point for point in modelled if not point.is_beyond]
    # The lines meet at the last point within.
    beyond = within[-1:] + [point for point in modelled if point.is_beyond]
    for name, points, dash in (("modelled", within, "solid"), ("modelled, beyond", beyond, "dash")):
        if len(points) > 1:
            yield _Line(name, [p.ranks for p in points], [p.speedup for p in points], dash, _MODEL)
    for law in laws:
        inside = [n for n in ranks if n <= law.largest_ranks]
        for name, some, dash in (
            (f"{law.name}'s law, fitted", inside, "solid"),
            (f"{law.name}'s law, beyond", inside[-1:] + [n for n in ranks if n > law.largest_ranks], "dash"),
        ):
            if len(some) > 1:
                yield _Line(name, some, [law.speedup(n).value for n in some], dash, _LAW)
    xs = sorted(measured)
    estimates = [measured[n] for n in xs]
    below = [estimate.value - estimate.between[0] for estimate in estimates]
    above = [estimate.between[1] - estimate.value for estimate in estimates]
    yield _Line("measured", xs, [e.value for e in estimates], "", _MODEL, "circle", (below, above))


def _trace(line: _Line) -> dict[str, Any]:
    mode = "+".join((["lines"] if line.dash else []) + (["markers"] if line.symbol else []))
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": mode,
        "name": line.name,
        "x": list(line.xs),
        "y": list(line.ys),
        "line": {"color": line.color, "dash": line.dash or "solid", "width": 1.5},
        "marker": {"color": line.color, "symbol": line.symbol or "circle", "size": 8},
    }
    if line.errors:
        below, above = line.errors
        trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return trace


def _in_words(line: _Line) -> str:
    return f"{line.name}: " + ", ".join(f"{x:g}: {y:.3g}" for x, y in zip(line.xs, line.ys, strict=True))


def _transparent(color: str) -> str:
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {_BAND})"
