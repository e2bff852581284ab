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
"""The labels of the categories (nbgpu.engine.memory.allocations), from the bottom of a stacked bar to its
top."""
_BEFORE, _REST = "held before", "the rest"
_CACHE = "cache of the data"
_MORE_COLORS = ("#d98cb3", "#5aa700", "#9a9a9a", "#6f9fb8")
_LABELS = (*NAMES.values(), _BEFORE, _REST)
_COLORS = dict(zip(_LABELS, (*RANK_COLORS, *_MORE_COLORS), strict=True))
"""By label. A category has the same colour in all figures, whichever other categories they show."""
_TITLE_WIDTH = 80
_GRID = "rgba(128, 128, 128, 0.25)"


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory that one rank took in the measured steps, in bytes."""

    rank: int
    tensors: Mapping[str, int]
    """The bytes by category at the peak of the tensors' memory."""
    before_bytes: int
    """The memory that the process held on the device before the steps."""
    peak_bytes: int
    """The peak memory of the process on the device."""
    cached_bytes: int | None = None
    """The host memory of the decoded volumes that a run keeps, on top of the peak; None if no data were
    read."""

    @property
    def tensors_bytes(self) -> int:
        """The peak memory of a step's tensors."""
        return sum(self.tensors.values())

    @property
    def rest_bytes(self) -> int:
        """The memory at the peak that is neither tensors nor was held before. Negative if memory that was
        held before was used again."""
        return self.peak_bytes - self.before_bytes - self.tensors_bytes


@dataclass(frozen=True)
class PredictedMemory:
    """The memory that the tensors of a step would take on one rank, in bytes."""

    settings: Mapping[str, Any]
    """The number of `ranks`, and the settings that differ from those that were measured."""
    tensors: Mapping[str, int] | None
    """The bytes by category; None if they cannot be predicted."""
    unknown: str
    """Why the memory cannot be predicted; empty if it can."""

    @property
    def tensors_bytes(self) -> int | None:
        """The peak memory of a step's tensors; None if it cannot be predicted."""
        return None if self.tensors is None else sum(self.tensors.values())


class Memory:
    """The memory of a step on each rank, measured, beside the prediction. Prints as a table.

    Args:
        title: the recipe and its most important settings.
        kind: the kind of the ranks' devices, 'cpu' or 'cuda'.
        measured: one for each rank.
        predicted: the prediction for the same settings and ranks.
        predict: predicts for changed settings and a number of ranks or several.
    """

    def __init__(
        self,
        title: str,
        kind: str,
        measured: Sequence[MeasuredMemory],
        predicted: PredictedMemory,
        predict: Callable[[Mapping[str, Any], Any], list[PredictedMemory]],
    ) -> None:
        """Keep the measurement, the prediction, and the function that predicts for other settings."""
        self.title = title
        self.kind = kind
        self.measured = list(measured)
        self.predicted = predicted
        self._predict = predict

    @property
    def error(self) -> float | None:
        """The relative error of the predicted tensors' memory on the rank where it is largest; None if there
        is no prediction."""
        predicted_bytes = self.predicted.tensors_bytes
        if predicted_bytes is None:
            return None
        errors = [predicted_bytes / measurement.tensors_bytes - 1 for measurement in self.measured]
        return max(errors, key=abs)

    def predict(self, ranks: int | Sequence[int] | None = None, **changes: Any) -> PredictedMemoryTable:
        """Predict the memory of a step's tensors for other settings. Nothing is allocated.

        Args:
            ranks: the number of ranks, or a list of several, up to 1024; None for the measured number.
            changes: settings as for `Cluster.train`, such as `batch_size`, `strategy`,
                `checkpoint_activations`, `amp` or `ema_decay`. A list stands for several values; all
                combinations are predicted.

        Raises:
            ConfigError: some combinations are not valid; the message has all of them.
        """
        return PredictedMemoryTable(self.title, self._predict(changes, ranks))

    def frame(self) -> pd.DataFrame:
        """One row for each rank and category, in bytes. `predicted_bytes` is NaN for categories without a
        prediction."""
        import pandas as pd

        predicted = {
            NAMES[key]: float(num_bytes) for key, num_bytes in (self.predicted.tensors or {}).items()
        }
        return pd.DataFrame(
            {
                "rank": measurement.rank,
                "category": name,
                "bytes": num_bytes,
                "predicted_bytes": predicted.get(name, float("nan")),
            }
            for measurement in self.measured
            for name, num_bytes in (*_rows(measurement).items(), (_CACHE, measurement.cached_bytes))
            if num_bytes is not None
        )

    def figure(self) -> go.Figure:
        """A bar for each rank, and one for the prediction, by category."""
        bars = {f"rank {measurement.rank}": _rows(measurement) for measurement in self.measured}
        title = f"Memory, measured: {self.title}"
        if self.predicted.tensors is not None:
            bars["predicted"] = {NAMES[key]: num_bytes for key, num_bytes in self.predicted.tensors.items()}
            title += " (the last bar is predicted: tensors only)"
        return _stacked_bars(title, bars, "rank")

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__
    _repr_html_ = shown_as_html

    def _in_lines(self) -> Iterator[str]:
        """Yield the lines of the printed table: a row for each category, with the bytes of each rank, the
        prediction and its error on rank 0."""
        yield f"measured: {self.title}"
        by_rank = [_rows(measurement) for measurement in self.measured]
        tensors = self.predicted.tensors
        rows = [("", *(f"rank {measurement.rank}" for measurement in self.measured), "predicted", "off by")]

        def row(name: str, measured: Sequence[int], predicted: int | None = None) -> tuple[str, ...]:
            error = "" if predicted is None or not measured[0] else f"{predicted / measured[0] - 1:+.0%}"
            return name, *map(_signed, measured), "" if predicted is None else in_words(predicted), error

        for key, name in NAMES.items():
            measured = [bytes_by_name[name] for bytes_by_name in by_rank]
            predicted = None if tensors is None else tensors[key]
            if any(measured) or predicted:
                rows.append(row(name, measured, predicted))
        rows.append(
            row("all tensors", [m.tensors_bytes for m in self.measured], self.predicted.tensors_bytes)
        )
        rows += [row(name, [bytes_by_name[name] for bytes_by_name in by_rank]) for name in (_BEFORE, _REST)]
        rows.append(row("peak", [m.peak_bytes for m in self.measured]))
        cached = [m.cached_bytes for m in self.measured if m.cached_bytes is not None]
        has_cache = len(cached) == len(self.measured)
        if has_cache:
            rows.append(row(_CACHE, cached))
        yield from aligned(rows, right=range(1, len(rows[0])))
        if self.predicted.unknown:
            yield f"no prediction: {self.predicted.unknown}"
        if self.kind == "cpu":
            yield "held before and peak: resident memory of the process, with Python's libraries"
        else:
            yield "held before: allocated by torch; peak: taken from the GPU by torch's allocator"
        if has_cache:
            yield f"{_CACHE}: the decoded data that a run keeps in host memory, on top of the peak"


class PredictedMemoryTable:
    """The predicted memory of a step's tensors for combinations of settings. Prints as a table.

    Args:
        title: the recipe and the settings of the measured run.
        rows: one for each combination of settings.
    """

    def __init__(self, title: str, rows: Sequence[PredictedMemory]) -> None:
        self.title = title
        self.rows = list(rows)

    def frame(self) -> pd.DataFrame:
        """One row for each combination: its settings, the categories and `total_bytes`, in bytes; NaN if they
        cannot be predicted."""
        import pandas as pd

        unknown = dict.fromkeys(NAMES, float("nan"))
        return pd.DataFrame(
            {
                **row.settings,
                **(row.tensors or unknown),
                "total_bytes": float("nan") if row.tensors_bytes is None else row.tensors_bytes,
            }
            for row in self.rows
        )

    def figure(self) -> go.Figure:
        """A bar for each combination of settings, by category."""
        shown = [(_format_settings(row), row.tensors) for row in self.rows if row.tensors is not None]
        # The labels below the bars name only settings that differ; equal ones go to the title.
        same = set.intersection(*(set(settings) for settings, _ in shown)) if len(shown) > 1 else set()
        bars = {
            "<br>".join(setting for setting in settings if setting not in same): {
                NAMES[key]: num_bytes for key, num_bytes in tensors.items()
            }
            for settings, tensors in shown
        }
        title = f"Memory of the tensors of a rank, predicted from: {self.title}"
        if same:
            title += f"; here {', '.join(setting for setting in shown[0][0] if setting in same)}"
        return _stacked_bars(title, bars, "setting")

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


def _format_settings(row: PredictedMemory) -> list[str]:
    return [f"{name}={value}" for name, value in row.settings.items()]


def _rows(measurement: MeasuredMemory) -> dict[str, int]:
    """Return the bytes by label; they add up to the peak."""
    tensors = {name: measurement.tensors.get(key, 0) for key, name in NAMES.items()}
    return {**tensors, _BEFORE: measurement.before_bytes, _REST: measurement.rest_bytes}


def _signed(num_bytes: int) -> str:
    return f"-{in_words(-num_bytes)}" if num_bytes < 0 else in_words(num_bytes)


def _stacked_bars(title: str, bars: Mapping[str, Mapping[str, int]], x_title: str) -> go.Figure:
    """Draw stacked bars of memory in MiB.

    Args:
        title: wrapped over several lines if it is long.
        bars: for each bar by its name, the bytes by the category's label.
        x_title: the title of the x axis.
    """
    import plotly.graph_objects as go

    traces = [
        go.Bar(
            name=label,
            x=list(bars),
            y=[bar.get(label, 0) / 2**20 for bar in bars.values()],
            marker={"color": _COLORS[label]},
        )
        for label in _LABELS
        if any(bar.get(label) for bar in bars.values())
    ]
    layout = {
        "barmode": "relative",
        "title": {"text": "<br>".join(wrap(title, _TITLE_WIDTH)), "font": {"size": 14}},
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": "memory, MiB"}, "gridcolor": _GRID},
        # Transparent, because the page may be light or dark.
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": TEXT_COLOR},
    }
    return go.Figure(traces, layout)
