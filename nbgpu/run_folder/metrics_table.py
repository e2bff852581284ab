"""The records of the ranks as one table in order of the steps, as one summary for each epoch, and under their
names in TensorBoard and W&B: 'train/loss', 'val/loss', 'rank0/samples_per_s'.

Ranks write at their own pace, and the records of a step come in pieces: its numbers, a validation after it,
and memory, which is measured now and then. A step is complete when every rank has gone beyond it. The same
records always give the same table, so that another process can rebuild or continue it with no gap and no
duplicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from nbgpu.protocol.records import (
    EXCHANGE_PARTS,
    FINAL_STATES,
    STATES_OF_NO_STEP,
    STEP_MOMENTS,
    STEP_PARTS,
    EpochSpan,
    Event,
    RunInfo,
    Sample,
    is_learning_rate,
)

STEP_SERIES = "step_s"
"""A series that only the samples of the steps themselves contain."""
VALIDATION = "val_"
"""The prefix of the names of validation values."""

_OF_RANK = frozenset({"step_s", "compute_s", "samples_per_s", *STEP_PARTS, *EXCHANGE_PARTS})
"""The series that are measured for each step on each rank."""


def is_of_rank(name: str) -> bool:
    """Return whether a series describes a rank, as times, memory and utilization do, and not the model."""
    return name in _OF_RANK or name.startswith(("memory_", "utilization_"))


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The numbers of one step on one rank."""

    step: int
    rank: int
    time_s: float
    """The time at which the step ended."""
    values: dict[str, float]
    """The values by series, without the moments of the step. Memory and utilization are the latest measured
    ones."""


class MetricsTable:
    """Collects the records of all ranks by step, until all ranks have recorded the step.

    Args:
        world_size: the number of ranks that record.
    """

    def __init__(self, world_size: int) -> None:
        """Begin with no records."""
        self._open: dict[int, dict[int, MetricsRow]] = {}
        """The rows of the steps that are not complete, by step and rank."""
        self._reached: list[float] = [-1] * world_size
        """The last step that each rank has recorded; infinity after the rank's end."""
        self._closed_step = 0
        """The last step whose rows were returned."""
        self.went_back = False
        """Whether a rank has gone back, to a checkpoint, behind steps whose rows were returned. Those rows
        are then wrong; a new table, filled with all records, returns the right ones."""
        self._measured: list[dict[str, float]] = [{} for _ in range(world_size)]

    @property
    def over(self) -> bool:
        """Whether every rank has recorded its end."""
        return min(self._reached) == math.inf

    def add(self, records: Iterable[Sample | Event]) -> list[MetricsRow]:
        """Add new records, those of each rank in order, and return the rows of the steps that are complete
        now."""
        for record in records:
            if isinstance(record, Sample):
                self._add_sample(record)
            elif record.kind == "state":
                if record.text in FINAL_STATES:
                    self._reached[record.rank] = math.inf
                elif record.text in STATES_OF_NO_STEP:
                    # The rank may go back to an earlier step, which the record of its next state has. No
                    # further step is complete until then.
                    self._reached[record.rank] = min(self._reached[record.rank], self._closed_step)
                else:
                    self._note_progress(record.rank, record.step)
        return self._close(min(self._reached))

    def rest(self) -> list[MetricsRow]:
        """Return the rows of the remaining steps, when no more records will come."""
        return self._close(math.inf)

    def _note_progress(self, rank: int, step: int) -> None:
        """Note that a rank has done `step` steps and goes on from there. If it had done more steps before, or
        had ended, it has gone back to a checkpoint, and its rows of later steps are dropped."""
        self._reached[rank] = min(self._reached[rank], step)
        self.went_back = self.went_back or step < self._closed_step
        for later in [later for later in self._open if later > step]:
            self._open[later].pop(rank, None)
            if not self._open[later]:
                del self._open[later]

    def _add_sample(self, sample: Sample) -> None:
        """Add one sample. The sample of a step itself makes a row; any other sample adds its values to the
        row of its step. Memory and utilization, which are measured about once a second, are in all later rows
        too, until they are measured again."""
        if STEP_SERIES in sample.values:
            if sample.step > self._closed_step:
                values = {n: value for n, value in sample.values.items() if n not in STEP_MOMENTS}
                values |= self._measured[sample.rank]
                row = MetricsRow(sample.step, sample.rank, sample.time_s, values)
                self._open.setdefault(sample.step, {})[sample.rank] = row
            self._reached[sample.rank] = sample.step
            return
        open_row = self._open.get(sample.step, {}).get(sample.rank)
        if open_row is not None:
            open_row.values.update(sample.values)
        measured = {name: v for name, v in sample.values.items() if not name.startswith(VALIDATION)}
        self._measured[sample.rank].update(measured)

    def _close(self, beyond: float) -> list[MetricsRow]:
        """Remove the rows of all open steps below `beyond`, and return them in order of step and rank."""
        done = sorted(step for step in self._open if step < beyond)
        self._closed_step = max(done, default=self._closed_step)
        return [row for step in done for _, row in sorted(self._open.pop(step).items())]


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """One pass over the data, or the part of a pass that the run did."""

    epoch: int
    """The number of the epoch, counted from 1."""
    first_step: int
    last_step: int
    complete: bool
    """Whether the summary covers all steps of the epoch. A run may begin or end in the middle of one."""
    train_s: float
    """The time of its steps, each as long as on the slowest rank."""
    samples: int
    """The number of samples over all ranks."""
    samples_per_s: float
    lr: float
    """The learning rate at the last step."""
    means: dict[str, float]
    """The means of the loss, its terms and the gradient's norm over steps and ranks, without values that are
    not finite."""
    validation: dict[str, float]
    """The last validation values, without 'val_' in their names."""
    samples_per_s_by_rank: list[float]
    own_s_by_rank: list[float]
    """The mean time per step of each rank without waiting for the other ranks, where that was measured (on a
    CPU), else of the whole step."""
    slowest_rank: int
    straggler_ratio: float
    """The highest of `own_s_by_rank` divided by the lowest."""
    peak_memory_bytes: float
    """The most memory that was measured on any rank; 0 if none was measured."""


class EpochSummarizer:
    """Summarizes rows, in order of their steps, by epoch.

    Args:
        span_of: returns the epoch to which a step belongs, such as `RunInfo.epoch_at`.
    """

    def __init__(self, span_of: Callable[[int], EpochSpan]) -> None:
        self._span_of = span_of
        self._rows: list[MetricsRow] = []

    def add(self, rows: Iterable[MetricsRow]) -> list[EpochSummary]:
        """Add the rows of the next complete steps, and return the epochs that end with them."""
        over: list[EpochSummary] = []
        for row in rows:
            if self._rows and self._span_of(row.step) != self._span_of(self._rows[0].step):
                over += self.rest()
            self._rows.append(row)
        if self._rows and self._rows[-1].step == self._span_of(self._rows[-1].step).last_step:
            over += self.rest()
        return over

    def rest(self) -> list[EpochSummary]:
        """Return the unfinished epoch when no more rows will come."""
        rows, self._rows = self._rows, []
        if not rows:
            return []
        first, last = rows[0].step, rows[-1].step
        span = self._span_of(first)
        by_rank: dict[int, list[MetricsRow]] = {}
        for row in rows:
            by_rank.setdefault(row.rank, []).append(row)
        own_s = {rank: _own_s(rows_of_rank) for rank, rows_of_rank in sorted(by_rank.items())}
        slowest = max(own_s, key=own_s.__getitem__)
        # A step takes as long as on its slowest rank.
        longest_s: dict[int, float] = {}
        for row in rows:
            longest_s[row.step] = max(longest_s.get(row.step, 0.0), row.values["step_s"])
        train_s = sum(longest_s.values())
        samples = round(sum(row.values.get("samples_per_s", 0.0) * row.values["step_s"] for row in rows))
        validation = {
            name.removeprefix(VALIDATION): value
            for row in rows
            for name, value in row.values.items()
            if name.startswith(VALIDATION)
        }
        return [
            EpochSummary(
                epoch=span.epoch,
                first_step=first,
                last_step=last,
                complete=(first, last) == (span.first_step, span.last_step),
                train_s=train_s,
                samples=samples,
                samples_per_s=samples / train_s if train_s else 0.0,
                lr=rows[-1].values.get("lr", 0.0),
                means=_means(rows),
                validation=validation,
                samples_per_s_by_rank=[
                    _mean(of_rank, "samples_per_s") for _, of_rank in sorted(by_rank.items())
                ],
                own_s_by_rank=list(own_s.values()),
                slowest_rank=slowest,
                straggler_ratio=own_s[slowest] / max(min(own_s.values()), 1e-9),
                peak_memory_bytes=max(_memory_bytes(row.values) for row in rows),
            )
        ]


def _own_s(rows: Sequence[MetricsRow]) -> float:
    """Return the mean time per step of a rank: without waiting for other ranks if all rows have that."""
    name = "compute_s" if all("compute_s" in row.values for row in rows) else "step_s"
    return _mean(rows, name)


def _mean(rows: Sequence[MetricsRow], name: str) -> float:
    return sum(row.values.get(name, 0.0) for row in rows) / len(rows)


def _means(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Return the mean over rows of the loss, its terms and the gradient's norm. NaN and infinite values are
    left out, so that a single NaN does not make the mean of an epoch NaN."""
    finite: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.values.items():
            if is_of_rank(name) or is_learning_rate(name) or name.startswith(VALIDATION):
                continue
            if math.isfinite(value):
                finite.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in finite.items()}


def _memory_bytes(values: Mapping[str, float]) -> float:
    return values.get("memory_reserved_bytes", values.get("memory_rss_bytes", 0.0))


def epochs_of(records: Iterable[Sample | Event], info: RunInfo) -> list[EpochSummary]:
    """Summarize the epochs of a run from all of its records."""
    if info.steps_per_epoch < 1:
        return []
    table, epochs = MetricsTable(info.world_size), EpochSummarizer(info.epoch_at)
    rows = [*table.add(records), *table.rest()]
    return [*epochs.add(rows), *epochs.rest()]


def steps_of(rows: Sequence[MetricsRow]) -> Iterator[tuple[int, list[MetricsRow]]]:
    """Yield (step, the rows of all ranks for the step) from rows in order of their steps."""
    for step, rows_of_step in groupby(rows, key=lambda row: row.step):
        yield step, list(rows_of_step)


def step_values(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Return the metrics of one step, from the rows of all ranks: means over the ranks such as 'train/loss',
    and the times and memory of each rank such as 'rank0/step_s'."""
    values: dict[str, float] = {}
    shared: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.values.items():
            if name.startswith(VALIDATION):
                values[f"val/{name.removeprefix(VALIDATION)}"] = value
            elif is_of_rank(name):
                values[f"rank{row.rank}/{name}"] = value
            else:
                shared.setdefault(name, []).append(value)
    return {f"train/{name}": sum(numbers) / len(numbers) for name, numbers in shared.items()} | values


def epoch_values(epoch: EpochSummary) -> dict[str, float]:
    """Return the metrics of an epoch, which are logged at its last step."""
    return {
        "epoch/number": float(epoch.epoch),
        "epoch/train_s": epoch.train_s,
        "epoch/samples_per_s": epoch.samples_per_s,
        "epoch/straggler_ratio": epoch.straggler_ratio,
        **{f"epoch/{name}": value for name, value in epoch.means.items()},
    }
