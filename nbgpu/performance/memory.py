"""The memory of a rank in a training step, by category: measured, and predicted for other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from nbgpu.text.html import shown_as_html
from nbgpu.text.palette import RANK_COLORS, TEXT_COLOR
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "buckets": "buckets of DDP",
    "gathered": "gathered by FSDP",
    "optimizer": "optimizer state",
    "average": "averaged weights",
    "discriminator": "discriminator",
    "batches": "batches",
    "activations": "activations",
    "scratch": "scratch of a kernel",
}
"""The labels of the categories (nbgpu.engine.memory.allocations), from the bottom of a picture to its top."""
_BEFORE, _REST = "held before", "the rest"
_CACHE = "cache of the data"
_MORE_COLORS = ("#d98cb3", "#5aa700", "#9a9a9a", "#6f9fb8")
_COLORS = dict(zip((*NAMES.values(), _BEFORE, _REST), (*RANK_COLORS, *_MORE_COLORS), strict=True))
"""The same in all pictures, whichever categories one has."""
_TITLE_WIDTH = 80
_GRID = "rgba(128, 128, 128, 0.25)"


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory that one rank took in the steps, in bytes."""

    rank: int
    tensors: Mapping[str, int]
    """By category, at the moment when the tensors took most."""
    before_bytes: int
    """What the process held on the device before the steps."""
    peak_bytes: int
    """The most that the process held on the device."""
    cached_bytes: int | None = None
    """What the decoded volumes take in host memory that a run keeps, besides; None if no data were read."""

    @property
    def tensors_bytes(self) -> int:
        """The most that the tensors of a step took."""
        return sum(self.tensors.values())

    @property
    def rest_bytes(self) -> int:
        """The memory that the process took beyond all tensors; the categories and this add up to the peak.

        Below 0 if memory that the process held before was used again.
        """
        return self.peak_bytes - self.before_bytes - self.tensors_bytes


@dataclass(frozen=True)
class PredictedMemory:
    """The memory that the tensors of a step would take on one rank, in bytes."""

    settings: Mapping[str, Any]
    """The number of `ranks`, and the settings that differ from those that were measured."""
    tensors: Mapping[str, int] | None
    """By category; None if it cannot be predicted."""
    unknown: str
    """Why it cannot be predicted."""

    @property
    def tensors_bytes(self) -> int | None:
        """The most that the tensors of a step would take; None if it is not known."""
        return None if self.tensors is None else sum(self.tensors.values())


class Memory:
    """The memory of a step on each rank, measured, beside the prediction. Prints as a table.

    Args:
        title: the recipe and what matters of its settings.
        kind: 'cpu' or 'cuda', of the ranks' devices.
        measured: one for each rank.
        predicted: for the same settings and ranks.
        ask: predicts for other settings and ranks.
    """

    def __init__(
        self,
        title: str,
        kind: str,
        measured: Sequence[MeasuredMemory],
        predicted: PredictedMemory,
        ask: Callable[[Mapping[str, Any], Any], list[PredictedMemory]],
    ) -> None:
        """Keep the measurement, the prediction, and the function that predicts for other settings."""
        self.title = title
        self.kind = kind
        self.measured = list(measured)
        self.predicted = predicted
        self._ask = ask

    @property
    def error(self) -> float | None:
        """The relative error of the prediction for the tensors, at the rank where it is largest; None if
        there is no prediction."""
        predicted_bytes = self.predicted.tensors_bytes
        if predicted_bytes is None:
            return None
        errors = [predicted_bytes / measurement.tensors_bytes - 1 for measurement in self.measured]
        return max(errors, key=abs)

    def predict(self, ranks: int | Sequence[int] | None = None, **changes: Any) -> PredictedMemoryTable:
        """Predict what the tensors of a step would take with other settings. Nothing is allocated.

        Args:
            ranks: the number of ranks, or a list of several, up to 1024; None for as many as there are.
            changes: settings as for `Cluster.train`, such as `batch_size`, `strategy`,
                `checkpoint_activations`, `amp` or `ema_decay`. A list stands for several values; all
                combinations are predicted.

        Raises:
            ConfigError: some combinations are not valid; the message has all of them.
        """
        return PredictedMemoryTable(self.title, self._ask(changes, ranks))

    def frame(self) -> pd.DataFrame:
        """One row for each rank and category, in bytes. `predicted_bytes` is NaN for what is not
        predicted."""
        import pandas as pd

        return pd.DataFrame(
            {
                "rank": measurement.rank,
                "category": name,
                "bytes": num_bytes,
                "predicted_bytes": self._predicted(name),
            }
            for measurement in self.measured
            for name, num_bytes in (_rows(measurement) | _cached(measurement)).items()
        )

    def figure(self) -> go.Figure:
        """A bar for each rank, and one for the prediction, by category."""
        bars = {f"rank {found.rank}": _rows(found) for found in self.measured}
        title = f"Memory, measured: {self.title}"
        if self.predicted.tensors is not None:
            bars["predicted"] = {_named(k): v for k, v in self.predicted.tensors.items()}
            title += " (the last bar is predicted: tensors only)"
        return _stacked(title, bars, "rank")

    def _predicted(self, name: str) -> float:
        tensors = self.predicted.tensors or {}
        return {_named(key): float(num_bytes) for key, num_bytes in tensors.items()}.get(name, float("nan"))

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__
    _repr_html_ = shown_as_html

    def _in_lines(self) -> Iterator[str]:
        """Yield the lines of the printed table: a row for each category, with the prediction and its
        error."""
        yield f"measured: {self.title}"
        of_ranks = [_rows(found) for found in self.measured]
        tensors = self.predicted.tensors
        rows = [("", *(f"rank {found.rank}" for found in self.measured), "predicted", "off by")]

        def row(name: str, found: Sequence[int], predicted: int | None) -> tuple[str, ...]:
            off = "" if predicted is None or not found[0] else f"{predicted / found[0] - 1:+.0%}"
            return name, *map(_signed, found), "" if predicted is None else in_words(predicted), off

        for key, name in NAMES.items():
            found = [of_rank[name] for of_rank in of_ranks]
            predicted = None if tensors is None else tensors[key]
            if any(found) or predicted:
                rows.append(row(name, found, predicted))
        rows.append(
            row("all tensors", [m.tensors_bytes for m in self.measured], self.predicted.tensors_bytes)
        )
        rows += [row(name, [of_rank[name] for of_rank in of_ranks], None) for name in (_BEFORE, _REST)]
        rows.append(row("peak", [m.peak_bytes for m in self.measured], None))
        cached = [_cached(found) for found in self.measured]
        if all(cached):
            rows.append(row(_CACHE, [of_rank[_CACHE] for of_rank in cached], None))
        yield from aligned(rows, right=range(1, len(rows[0])))
        if self.predicted.unknown:
            yield f"no prediction: {self.predicted.unknown}"
        if self.kind == "cpu":
            yield "held before and peak: resident memory of the process, with Python's libraries"
        else:
            yield "held before: allocated by torch; peak: taken from the GPU by torch's allocator"
        if all(cached):
            yield f"{_CACHE}: the decoded data that a run keeps in host memory, on top of the peak"


class PredictedMemoryTable:
    """The memory that the tensors of a step would take with some settings. Prints as a table.

    Args:
        title: the measured run.
        rows: one for each combination of settings.
    """

    def __init__(self, title: str, rows: Sequence[PredictedMemory]) -> None:
        self.title = title
        self.rows = list(rows)

    def frame(self) -> pd.DataFrame:
        """One row for each combination: its settings, the categories and `total_bytes`, in bytes; NaN if they
        are not known."""
        import pandas as pd

        nothing = dict.fromkeys(NAMES, float("nan"))
        return pd.DataFrame(
            {
                **row.settings,
                **(row.tensors or nothing),
                "total_bytes": float("nan") if row.tensors_bytes is None else row.tensors_bytes,
            }
            for row in self.rows
        )

    def figure(self) -> go.Figure:
        """A bar for each combination of settings, by category."""
        shown = [row for row in self.rows if row.tensors is not None]
        # The labels below the bars name only settings that differ; equal ones go to the title.
        same = set.intersection(*({*_format_row(row)} for row in shown)) if len(shown) > 1 else set()
        bars = {
            "<br>".join(words for words in _format_row(row) if words not in same): {
                _named(key): num_bytes for key, num_bytes in (row.tensors or {}).items()
            }
            for row in shown
        }
        title = f"Memory of the tensors of a rank, predicted from: {self.title}"
        if same:
            title += f"; here {', '.join(words for words in _format_row(shown[0]) if words in same)}"
        return _stacked(title, bars, "setting")

    def __str__(self) -> str:
        """Return a table with a row for each combination of settings and a column for each category that
        occurs."""
        names = [key for key in NAMES if any((row.tensors or {}).get(key) for row in self.rows)]
        settings = list(self.rows[0].settings)
        rows = [(*settings, *(NAMES[key] for key in names), "all tensors")]
        rows += [
            (
                *(str(value) for value in row.settings.values()),
                *("" if row.tensors is None else in_words(row.tensors[key]) for key in names),
                f"not known: {row.unknown}" if row.tensors_bytes is None else in_words(row.tensors_bytes),
            )
            for row in self.rows
        ]
        return "\n".join(
            [
                f"predicted, not measured, for each rank: {self.title}, with these changes",
                *aligned(rows, right=range(len(rows[0]))),
            ]
        )

    __repr__ = __str__
    _repr_html_ = shown_as_html


def _format_row(row: PredictedMemory) -> list[str]:
    return [f"{name}={value}" for name, value in row.settings.items()]


def _named(key: str) -> str:
    return NAMES.get(key, key)


def _rows(measurement: MeasuredMemory) -> dict[str, int]:
    """Return the bytes by name; they add up to the peak."""
    tensors = {name: measurement.tensors.get(key, 0) for key, name in NAMES.items()}
    return {**tensors, _BEFORE: measurement.before_bytes, _REST: measurement.rest_bytes}


def _cached(measurement: MeasuredMemory) -> dict[str, int]:
    return {} if measurement.cached_bytes is None else {_CACHE: measurement.cached_bytes}


def _signed(num_bytes: int) -> str:
    return f"-{in_words(-num_bytes)}" if num_bytes < 0 else in_words(num_bytes)


def _stacked(title: str, bars: Mapping[str, Mapping[str, int]], x_title: str) -> go.Figure:
    """Draw stacked bars of memory in MiB.

    Args:
        title: the title, which is wrapped.
        bars: the bytes by category, for each bar by its label.
        x_title: the name of the x axis.
    """
    import plotly.graph_objects as go

    names = [
        name for name in (*NAMES.values(), _BEFORE, _REST) if any(bar.get(name) for bar in bars.values())
    ]
    traces = [
        go.Bar(
            name=name,
            x=list(bars),
            y=[bar.get(name, 0) / 2**20 for bar in bars.values()],
            marker={"color": _COLORS[name]},
        )
        for name in names
    ]
    layout = {
        "barmode": "relative",
        "title": {"text": "<br>".join(wrap(title, _TITLE_WIDTH)), "font": {"size": 14}},
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": "memory, MiB"}, "gridcolor": _GRID},
        # A page may be light or dark, which is not known here.
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": TEXT_COLOR},
    }
    return go.Figure(traces, layout)
