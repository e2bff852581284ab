"""Modelled steps for numbers of ranks, as a table, in sentences and as a picture of the speed-up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nbgpu.errors import ConfigError
from nbgpu.performance.costs import MAX_RANKS, Costs, End
from nbgpu.performance.laws import Estimate, Law
from nbgpu.performance.schedule import Bucket, Exchange, ShardedBlock, play, play_sharded
from nbgpu.text.html import shown_as_html
from nbgpu.text.palette import RANK_COLORS, TEXT_COLOR
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

_BISECTION_STEPS = 20
_LARGEST_FACTOR = 1024.0

_MODEL_COLOR, _LAW_COLOR = RANK_COLORS[:2]
_GRID = "rgba(128, 128, 128, 0.25)"
_BAND_OPACITY = 0.15
_ABOVE_PX, _PLOT_PX = 40, 340
_AXIS_PX = 60
"""The height of the x axis's numbers and title."""
_LEGEND_LINE_PX = 19


@dataclass(frozen=True)
class ModelledStep:
    """The modelled time of a step for a number of ranks. Every rank has the batch size that was measured."""

    ranks: int
    step_s: float
    between_s: tuple[float, float]
    """The step time with the fastest and with the slowest links that the measurement allows."""
    exchange: Exchange | None
    """None for one rank, which exchanges nothing."""
    samples_per_s: float
    efficiency: float
    """Samples per second of each rank, divided by those of one rank alone."""
    is_beyond: bool
    """Whether this is an extrapolation: to more ranks than were measured, or to other links."""

    @property
    def speedup(self) -> float:
        """Samples per second of all ranks, divided by those of one rank alone."""
        return self.ranks * self.efficiency

    @property
    def speedup_between(self) -> tuple[float, float]:
        """The interval of the speed-up, which follows from that of the step time."""
        fastest_s, slowest_s = self.between_s
        return self.speedup * self.step_s / slowest_s, self.speedup * self.step_s / fastest_s


@dataclass(frozen=True)
class StepModel:
    """A model of a training step: computation times (of all micro-batches of one rank), the tensors that the
    ranks exchange, and the cost of collectives."""

    title: str
    samples: int
    """The samples of one rank's step."""
    computing_s: float
    """The time of a step without the exchange."""
    forward_s: float
    backward_s: float
    optimizer_s: float
    last_backward_s: float
    """The backward pass of the last micro-batch, in which gradients are exchanged."""
    micro_batches: int
    buckets: tuple[Bucket, ...]
    blocks: tuple[ShardedBlock, ...]
    rest_bytes: float
    """The bytes of the weights outside of all blocks."""
    costs: Costs
    is_sharded: bool
    """Whether the strategy is FSDP instead of DDP."""
    overlaps: bool
    """Whether FSDP's collectives run while the ranks compute."""

    def step(self, ranks: int, end: End = "expected") -> tuple[float, Exchange | None]:
        """Return the time of a step in seconds, and its exchange (None for one rank).

        Args:
            ranks: the number of ranks.
            end: which end of the interval of the collectives' costs to take.

        Raises:
            ConfigError: the ranks do not fill the nodes.
        """
        if ranks == 1:
            return self.computing_s, None
        if not self.is_sharded:
            costs = self.costs
            timing = costs.timing("all_reduce", ranks, end)
            exchange = play(self.buckets, self.last_backward_s, timing, costs.at_once, costs.gain)
            return self.computing_s + exchange.exposed_s, exchange
        exchange = play_sharded(
            self.blocks,
            self.rest_bytes,
            self.forward_s / self.micro_batches,
            self.backward_s / self.micro_batches,
            self.costs.timing("all_gather", ranks, end),
            self.costs.timing("reduce_scatter", ranks, end),
            self.overlaps,
        )
        # Each rank updates its own shard only.
        saved_s = self.optimizer_s * (1 - 1 / ranks)
        return self.computing_s - saved_s + self.micro_batches * exchange.exposed_s, exchange

    def modelled(self, ranks: int) -> ModelledStep:
        """Return the step for a number of ranks, with its interval between the fastest and the slowest links
        that the measurement allows."""
        step_s, exchange = self.step(ranks)
        least_s, most_s = self.step(ranks, "least")[0], self.step(ranks, "most")[0]
        return ModelledStep(
            ranks,
            step_s,
            # An end may lie on the wrong side of the expected time. The interval always contains it.
            between_s=(min(least_s, step_s), max(most_s, step_s)),
            exchange=exchange,
            samples_per_s=self.samples * ranks / step_s,
            efficiency=self.computing_s / step_s,
            is_beyond=ranks > max(1, self.costs.measured_ranks),
        )

    def share_added(self, ranks: int) -> float:
        """Return the time that the exchange adds to a step, divided by the time of the computation."""
        return self.step(ranks)[0] / self.computing_s - 1

    def with_batch(self, factor: float) -> StepModel:
        """Return the model for a batch `factor` times as large: forward and backward passes take `factor`
        times as long."""
        return replace(
            self,
            computing_s=self.computing_s + (factor - 1) * (self.forward_s + self.backward_s),
            forward_s=factor * self.forward_s,
            backward_s=factor * self.backward_s,
            last_backward_s=factor * self.last_backward_s,
            buckets=tuple(Bucket(factor * bucket.ready_s, bucket.num_bytes) for bucket in self.buckets),
            blocks=tuple(ShardedBlock(block.num_bytes, factor * block.forward_s) for block in self.blocks),
        )

    def with_gradients(self, factor: float) -> StepModel:
        """Return the model for `factor` times the bytes of gradients and weights, as with compression."""
        return replace(
            self,
            buckets=tuple(Bucket(bucket.ready_s, factor * bucket.num_bytes) for bucket in self.buckets),
            blocks=tuple(ShardedBlock(factor * block.num_bytes, block.forward_s) for block in self.blocks),
            rest_bytes=factor * self.rest_bytes,
        )


@dataclass(frozen=True)
class Hidden:
    """The number of ranks up to which the computation hides the exchange. Prints as a sentence."""

    share: float
    """The exchange counts as hidden if it adds at most this share of the computation's time to a step."""
    ranks: int
    """The largest number of ranks with a hidden exchange; 1 if it is never hidden."""
    largest_ranks: int
    """The largest number of ranks in the prediction."""
    batch_factor: float | None
    """The factor for the batch size that hides the exchange for `largest_ranks`; None if no factor up to 1024
    does."""
    gradients_factor: float | None
    """The factor for the bytes of gradients that hides the exchange for `largest_ranks`; None if no factor
    does, because the latency alone is too long."""

    def __str__(self) -> str:
        """Return a sentence with the number of ranks up to which the exchange is hidden, and with the changes
        that would hide it for more."""
        most = f"{self.share:.0%}"
        if self.ranks >= MAX_RANKS:
            return f"the computation hides the exchange: it adds at most {most} to a step, up to {MAX_RANKS} ranks"
        if self.ranks == 1:
            text = f"the exchange is not hidden: with the fewest ranks it adds more than {most} to a step"
        else:
            text = f"the computation hides the exchange up to {self.ranks} ranks: it adds at most {most} to a step"
        if self.largest_ranks <= self.ranks:
            return text
        changes = []
        if self.batch_factor is not None:
            changes.append(f"{self.batch_factor:.3g} times the batch")
        if self.gradients_factor is not None:
            changes.append(f"{self.gradients_factor:.2g} times the bytes of gradients")
        text += f". At {self.largest_ranks} ranks "
        text += f"it is hidden with {', or with '.join(changes)}" if changes else "no larger batch hides it"
        if self.gradients_factor is None:
            text += ". Fewer bytes do not, because the latency of the messages alone takes longer"
        return text


class Modelled:
    """Modelled steps for some numbers of ranks. Prints as a table.

    Args:
        model: the model of a step.
        ranks: the numbers of ranks.
        measured_ranks: for how many ranks a step was measured; 0 for none.
        measured_s: that step.
    """

    def __init__(
        self, model: StepModel, ranks: Sequence[int], measured_ranks: int, measured_s: float
    ) -> None:
        self._model = model
        self._measured_ranks = measured_ranks
        self._measured_s = measured_s
        self.steps = [model.modelled(n) for n in ranks]

    def hidden_up_to(self, share: float = 0.05) -> Hidden:
        """Return the number of ranks up to which the computation hides the exchange, and the factors for the
        batch size and the bytes of gradients that would hide it for the most ranks of this prediction.

        Args:
            share: the exchange counts as hidden if it adds at most this share of the computation's time to a
                step.

        Raises:
            ConfigError: the share is not above 0.
        """
        if not share > 0:
            raise ConfigError(f"share = {share} is not valid: above 0, such as 0.05")
        # The share that the exchange adds to a step grows with the number of ranks, so bisection finds the
        # largest number for which it is small enough.
        valid = [n for n in range(2, MAX_RANKS + 1) if self._fills_nodes(n)]
        count = bisect_left(valid, True, key=lambda n: self._model.share_added(n) > share)
        largest = max(step.ranks for step in self.steps)
        hidden_ranks = valid[count - 1] if count else 1
        if largest <= hidden_ranks:
            return Hidden(share, hidden_ranks, largest, 1.0, 1.0)
        batch = _smallest_factor(lambda f: self._model.with_batch(f).share_added(largest) <= share)
        # The search is for a growing factor, and the bytes are to shrink: search for the inverse.
        shrinking = _smallest_factor(
            lambda f: self._model.with_gradients(1 / f).share_added(largest) <= share
        )
        return Hidden(share, hidden_ranks, largest, batch, None if shrinking is None else 1 / shrinking)

    def _fills_nodes(self, ranks: int) -> bool:
        """Return whether this number of ranks fills whole nodes: costs over several nodes are only modelled
        for full nodes."""
        try:
            self._model.costs.timing("all_gather" if self._model.is_sharded else "all_reduce", ranks)
        except ConfigError:
            return False
        return True

    def figure(
        self,
        measured: Mapping[int, Estimate] | None = None,
        laws: Sequence[Law] = (),
    ) -> Picture:
        """Draw the speed-up in samples per second, with its interval.

        The line is dashed beyond the measured ranks.

        Args:
            measured: speed-ups by number of ranks (`nbgpu.performance.laws.speedups`); None for the one that
                was measured with this step.
            laws: fitted laws to be drawn beside it.
        """
        if measured is None:
            measured = {}
            if self._measured_ranks:
                speedup = self._measured_ranks * self._model.computing_s / self._measured_s
                measured = {self._measured_ranks: Estimate(speedup, (speedup, speedup))}
        steps = sorted(self.steps, key=lambda step: step.ranks)
        return _speedup_figure(f"modelled: {self._model.title}", steps, measured, laws)

    def frame(self) -> pd.DataFrame:
        """One row for each number of ranks."""
        import pandas as pd

        return pd.DataFrame(
            {
                "ranks": step.ranks,
                "step_s": step.step_s,
                "from_s": step.between_s[0],
                "to_s": step.between_s[1],
                "exchange_s": step.exchange.busy_s if step.exchange else 0.0,
                "exposed_s": step.exchange.exposed_s if step.exchange else 0.0,
                "samples_per_s": step.samples_per_s,
                "efficiency": step.efficiency,
                "beyond_measured": step.is_beyond,
            }
            for step in self.steps
        )

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__
    _repr_html_ = shown_as_html

    def _in_lines(self) -> Iterator[str]:
        """Yield the lines of the printed table: a title, the rows, the costs of the links, what the columns
        'from' and 'to' mean, and the number of ranks up to which the exchange is hidden, unless all rows are
        for one rank."""
        strategy = "FSDP" if self._model.is_sharded else "DDP"
        yield f"modelled, not measured: {self._model.title}; {strategy}, the same batch for each rank"
        heading = ("ranks", "a step, ms", "from", "to", "exchange, ms", "not hidden, ms", "samples/s")
        rows = [(*heading, "efficiency", "")]
        rows += [
            (
                str(step.ranks),
                f"{1e3 * step.step_s:.2f}",
                f"{1e3 * step.between_s[0]:.2f}",
                f"{1e3 * step.between_s[1]:.2f}",
                f"{1e3 * step.exchange.busy_s:.2f}" if step.exchange else "",
                f"{1e3 * step.exchange.exposed_s:.2f}" if step.exchange else "",
                f"{step.samples_per_s:.1f}",
                f"{step.efficiency:.0%}",
                self._remark(step),
            )
            for step in self.steps
        ]
        yield from aligned(rows, right=range(8))
        yield str(self._model.costs)
        yield (
            "from, to: the step with the fastest and with the slowest links that the measurement allows; 'from' also counts "
            "a collective as over a tree and not over a ring"
        )
        if any(step.ranks > 1 for step in self.steps):
            yield str(self.hidden_up_to())

    def _remark(self, step: ModelledStep) -> str:
        """Return the remark of a row: the error of the model if this number of ranks was measured, or that
        the row is extrapolated."""
        if step.ranks == self._measured_ranks and not step.is_beyond:
            error = step.step_s / self._measured_s - 1
            return f"measured: {1e3 * self._measured_s:.2f} ms, the model is off by {error:+.0%}"
        if not step.is_beyond:
            return ""
        return "beyond what was measured" if self._model.costs.measured_ranks else "over links not measured"


def _smallest_factor(is_enough: Callable[[float], bool]) -> float | None:
    """Return the smallest factor from 1 to 1024 that is enough, by bisection in logarithmic scale; None if
    1024 is not enough. Every factor above one that is enough must be enough, too."""
    if not is_enough(_LARGEST_FACTOR):
        return None
    low, high = 1.0, _LARGEST_FACTOR
    for _ in range(_BISECTION_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class _Line:
    """A curve of the figure, or measured points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dash: str
    """Plotly's name of the line style; '' for points without a line."""
    color: str
    symbol: str = ""
    errors: tuple[Sequence[float], Sequence[float]] | None = None
    """The lengths of the error bars below and above the values."""


class Picture:
    """A figure that a notebook draws with Plotly, and that prints as text elsewhere.

    Attributes:
        figure: the figure as Plotly's JSON.
    """

    def __init__(self, figure: dict[str, Any], text: str) -> None:
        self.figure = figure
        self._text = text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.plotly.v1+json": self.figure, "text/plain": self._text}

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def _speedup_figure(
    title: str, modelled: Sequence[ModelledStep], measured: Mapping[int, Estimate], laws: Sequence[Law]
) -> Picture:
    """Draw speed-ups over the number of ranks, both in logarithmic scale.

    Args:
        title: begins with 'modelled'.
        modelled: in ascending order of ranks.
        measured: speed-ups by number of ranks, drawn as points with their intervals.
        laws: drawn as lines, which are dashed beyond the ranks that they were fitted to.
    """
    lines = list(_lines(modelled, measured, laws))
    band = {
        "type": "scatter",
        "mode": "lines",
        "name": "modelled, interval",
        "x": [*(p.ranks for p in modelled), *(p.ranks for p in reversed(modelled))],
        "y": [*(p.speedup_between[1] for p in modelled), *(p.speedup_between[0] for p in reversed(modelled))],
        "fill": "toself",
        "fillcolor": _transparent(_MODEL_COLOR),
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
            "font": {"color": TEXT_COLOR, "size": 12},
            "margin": {"l": 60, "r": 20, "t": _ABOVE_PX, "b": below_px},
            "title": {"text": title, "x": 0, "font": {"size": 14}},
            "xaxis": {**axis, "title": {"text": "ranks"}, "tickvals": sorted({p.ranks for p in modelled})},
            "yaxis": {**axis, "title": {"text": "speed-up in samples per second"}, "dtick": "D2"},
            "legend": {"x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        },
        "config": {"responsive": True, "displaylogo": False},
    }
    return Picture(figure, "\n".join([title, *map(_format_line, lines)]))


def _lines(
    modelled: Sequence[ModelledStep], measured: Mapping[int, Estimate], laws: Sequence[Law]
) -> Iterator[_Line]:
    """Yield the curves of the speed-up: ideal, modelled, and the laws; then the measured points. Curves are
    solid up to the number of ranks that was measured or fitted, and dashed beyond."""
    ranks = [step.ranks for step in modelled]
    yield _Line("ideal", ranks, ranks, "longdash", TEXT_COLOR)
    solid = [step for step in modelled if not step.is_beyond]
    # A dashed line begins at the last solid point, so that there is no gap.
    dashed = solid[-1:] + [step for step in modelled if step.is_beyond]
    for name, steps, dash in (("modelled", solid, "solid"), ("modelled, beyond", dashed, "dash")):
        if len(steps) > 1:
            yield _Line(name, [s.ranks for s in steps], [s.speedup for s in steps], dash, _MODEL_COLOR)
    for law in laws:
        fitted = [n for n in ranks if n <= law.largest_ranks]
        beyond = fitted[-1:] + [n for n in ranks if n > law.largest_ranks]
        for name, xs, dash in (("fitted", fitted, "solid"), ("beyond", beyond, "dash")):
            if len(xs) > 1:
                ys = [law.speedup(n).value for n in xs]
                yield _Line(f"{law.name}'s law, {name}", xs, ys, dash, _LAW_COLOR)
    if not measured:
        return
    xs = sorted(measured)
    estimates = [measured[n] for n in xs]
    below = [estimate.value - estimate.between[0] for estimate in estimates]
    above = [estimate.between[1] - estimate.value for estimate in estimates]
    yield _Line("measured", xs, [e.value for e in estimates], "", _MODEL_COLOR, "circle", (below, above))


def _trace(line: _Line) -> dict[str, Any]:
    """Return Plotly's trace of a curve or of points with error bars."""
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


def _format_line(line: _Line) -> str:
    """Return the points of a line as text, such as 'modelled: 1: 1, 2: 1.9'."""
    return f"{line.name}: " + ", ".join(f"{x:g}: {y:.3g}" for x, y in zip(line.xs, line.ys, strict=True))


def _transparent(color: str) -> str:
    """Return a colour '#rrggbb' as 'rgba(...)' with the opacity of a band."""
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return f"rgba({red}, {green}, {blue}, {_BAND_OPACITY})"
