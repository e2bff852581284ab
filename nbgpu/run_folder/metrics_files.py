"""Write `metrics.csv` and `epochs.jsonl` in a run's folder, and pass the metrics of a run on to other sinks.

The metrics come from the records that the ranks write anyway, so that no rank waits. Rank 0 writes the files
while it trains; the notebook completes the files of a run whose rank 0 is gone. Existing files are continued.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import lines, names
from nbgpu.run_folder.metrics_table import EpochSummarizer, EpochSummary, MetricsRow, MetricsTable
from nbgpu.run_folder.names import EPOCHS, METRICS
from nbgpu.run_folder.rank_files import Tail

_log = logging.getLogger("nbgpu.metrics_files")

_KEYS = ("step", "epoch", "rank", "time_s")
_LAST_LINES_BYTES = 2**20
"""More bytes than the rows of all ranks for one step have."""
_MAX_DIGITS = 18
"""The most digits that a step can have."""


class Sink(Protocol):
    """A destination for a run's metrics. A sink that raises an exception gets nothing more; the run and the
    other sinks go on."""

    def take(self, rows: Sequence[MetricsRow], epochs: Sequence[EpochSummary]) -> None:
        """Take the rows of the next complete steps, in order, and the epochs that end with them."""

    def close(self) -> None:
        """Finish writing, because no more rows will come."""


class MetricsFile:
    """`metrics.csv`: one row for each step and rank, one column for each series.

    A series that appears later gets a column at the end, which is empty in the earlier rows.

    Attributes:
        last_step: the last step in the existing file; its rows are written again.
    """

    def __init__(self, folder: Path, epoch_of: Callable[[int], int]) -> None:
        self._path = folder / METRICS
        self._epoch = epoch_of
        self._columns: list[str] = []
        self.last_step = 0
        if self._path.exists():
            self._truncate_last_step()

    def take(self, rows: Sequence[MetricsRow], epochs: Sequence[EpochSummary]) -> None:
        """Append the rows, after adding a column for each new series."""
        new = dict.fromkeys(name for row in rows for name in row.values if name not in self._columns)
        if new:
            self._add_columns(list(new))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            values = [row.values.get(name, "") for name in self._columns]
            writer.writerow([row.step, self._epoch(row.step), row.rank, f"{row.time_s:.3f}", *values])
        with self._path.open("a") as file:
            file.write(text.getvalue())

    def close(self) -> None:
        pass

    def _truncate_last_step(self) -> None:
        """Cut the rows of the last step off the file, because they may be incomplete, and note the step and
        the columns of the file."""
        with self._path.open("rb+") as file:
            self._columns = file.readline().decode().strip().split(",")[len(_KEYS) :]
            begin = file.tell()
            end = file.seek(max(begin, file.seek(0, io.SEEK_END) - _LAST_LINES_BYTES))
            if end > begin:  # in the middle of a line
                end += len(file.readline())
            whole = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            try:
                steps = [int(line.split(b",")[0]) for line in whole]
            except ValueError:
                raise ValueError(
                    "its last lines are not what nbgpu writes. Take it away: `nbgpu report` makes it again when the run is over"
                ) from None
            if whole:
                self.last_step = steps[-1]
            for line, step in zip(whole, steps, strict=True):
                if step == self.last_step:
                    break
                end += len(line)
            file.truncate(end)

    def _add_columns(self, names: Sequence[str]) -> None:
        """Rewrite the file with more columns. That is rare, because nearly all steps have the same series."""
        self._columns += names
        unfinished = self._path.with_suffix(".tmp")
        with unfinished.open("w") as new:
            new.write(",".join([*_KEYS, *self._columns]) + "\n")
            if self._path.exists():
                with self._path.open() as old:
                    next(old, None)
                    new.writelines(line.rstrip("\n") + "," * len(names) + "\n" for line in old)
        unfinished.rename(self._path)


class EpochsFile:
    """`epochs.jsonl`: one JSON object for each epoch, with the fields of `metrics_table.EpochSummary`.

    Attributes:
        last_step: the last step in the existing file; epochs that began later are written.
    """

    def __init__(self, folder: Path) -> None:
        """Keep the complete epochs at the beginning of an existing file. The other epochs are cut off, and
        written again from the records of the ranks."""
        self._path = folder / EPOCHS
        self.last_step = 0
        if self._path.exists():
            kept = []
            for fields in lines.load_lines(self._path):
                last_step = None if fields is None else fields.get("last_step")
                if fields is None or type(last_step) is not int or last_step <= self.last_step:
                    break
                if fields.get("complete") is True:
                    kept.append(json.dumps(fields) + "\n")
                    self.last_step = last_step
            self._path.write_text("".join(kept))

    def take(self, rows: Sequence[MetricsRow], epochs: Sequence[EpochSummary]) -> None:
        """Append the epochs that the file does not have yet."""
        new = [epoch for epoch in epochs if epoch.first_step > self.last_step]
        if new:
            with self._path.open("a") as file:
                file.writelines(json.dumps(asdict(epoch)) + "\n" for epoch in new)

    def close(self) -> None:
        pass


class MetricsWriter:
    """Reads the records of a run's ranks, and passes the rows and epochs made of them to `metrics.csv`,
    `epochs.jsonl` and other sinks.

    Args:
        folder: the run's folder, which contains `run_info.json`.
        more: by name, functions that make other sinks, each called with the last step that the sink does
            not get.
        tell: called with a sentence about each sink that fails and gets nothing more.
    """

    def __init__(
        self,
        folder: Path,
        more: Mapping[str, Callable[[int], Sink]] | None = None,
        tell: Callable[[str], None] = _log.warning,
    ) -> None:
        """Open the files and make the other sinks, each with the step from which it goes on. A sink that
        cannot be opened is left out."""
        self._folder = folder
        self._tell = tell
        self._sinks: dict[str, Sink] = {}
        self._known_steps: dict[str, int] = {}
        """The last step that each sink already has. Rows up to it are not passed on again."""
        self._newest_step = 0
        """The last step that was passed on to the sinks."""
        self._read_from_the_beginning()
        self._make(METRICS, lambda _: MetricsFile(folder, self._epoch), 0)
        if isinstance(metrics := self._sinks.get(METRICS), MetricsFile):
            # The last step of the file may be incomplete.
            self._known_steps[METRICS] = max(metrics.last_step - 1, 0)
        # EpochsFile itself skips the epochs that its file has.
        self._make(EPOCHS, lambda _: EpochsFile(folder), 0)
        for name, make in (more or {}).items():
            self._make(name, make, self._known_steps[METRICS])

    @property
    def over(self) -> bool:
        """Whether every rank has recorded its end."""
        return self._table.over

    def update(self) -> None:
        """Pass on the steps that have become complete since the last call. If the run went back to a
        checkpoint and repeats steps that were passed on already, rewrite the files from the first record."""
        rows = self._new_rows()
        if self._table.went_back:
            self._begin_the_files_again()
            rows = self._new_rows()
        self._write_rows(rows, self._epochs.add(rows))

    def finish(self) -> None:
        """Pass on all remaining steps and close the sinks, when no more records will come."""
        self.update()
        rows = self._table.rest()
        epochs = self._epochs.add(rows) + self._epochs.rest()
        self._write_rows(rows, epochs)
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - see `_make`
                self._disable(name, error)

    def _read_from_the_beginning(self) -> None:
        """Prepare to read the records of all ranks from the first one on, into an empty table."""
        self._info = runs.read_info(self._folder)
        self._tails = [Tail(self._folder, rank) for rank in range(self._info.world_size)]
        self._table = MetricsTable(self._info.world_size)
        self._epochs = EpochSummarizer(lambda step: self._info.epoch_at(step))

    def _epoch(self, step: int) -> int:
        return self._info.epoch_at(step).epoch

    def _new_rows(self) -> list[MetricsRow]:
        """Read the new records of all ranks, and return the rows of the steps that are complete now."""
        records = [record for tail in self._tails for record in tail.new()]
        # The info is read after the records: where the number of steps per epoch changes, the ranks write
        # the info before the first step that it holds for.
        self._info = runs.read_info(self._folder)
        return self._table.add(records)

    def _make(self, name: str, make: Callable[[int], Sink], known_step: int) -> None:
        """Make a sink that has everything up to the step `known_step` already. If that fails, training goes
        on without the sink."""
        self._known_steps[name] = known_step
        try:
            self._sinks[name] = make(known_step)
        except Exception as error:  # noqa: BLE001 - training goes on without it, and the user is told
            self._disable(name, error)

    def _begin_the_files_again(self) -> None:
        """Empty the files and begin again with the first record, because the ranks went back and repeat
        steps. The other sinks keep the values of the steps as they were done first."""
        self._read_from_the_beginning()
        self._known_steps = {name: max(step, self._newest_step) for name, step in self._known_steps.items()}

        def emptied(name: str, _: int) -> Sink:
            """Remove a file, and return the sink that writes it again."""
            (self._folder / name).unlink(missing_ok=True)
            return MetricsFile(self._folder, self._epoch) if name == METRICS else EpochsFile(self._folder)

        for name in {METRICS, EPOCHS} & self._sinks.keys():
            self._make(name, partial(emptied, name), known_step=0)

    def _write_rows(self, rows: Sequence[MetricsRow], epochs: Sequence[EpochSummary]) -> None:
        """Pass to each sink the rows and epochs that it does not have yet. A sink that fails gets nothing
        more; the others go on."""
        if rows:
            self._newest_step = max(self._newest_step, rows[-1].step)
        # metrics.csv comes last, because it records how far the other sinks have got.
        for name, sink in sorted(self._sinks.items(), key=lambda named: named[0] == METRICS):
            new = [row for row in rows if row.step > self._known_steps[name]]
            over = [epoch for epoch in epochs if epoch.last_step > self._known_steps[name]]
            if not new and not over:
                continue
            try:
                sink.take(new, over)
            except Exception as error:  # noqa: BLE001 - see `_make`
                self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        """Drop a sink, and report why."""
        self._sinks.pop(name, None)
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
        self._tell(f"{name} is not written any more: {cause}")


def complete(folder: Path, last_step: int, surely: bool = False) -> None:
    """Rewrite the files of a run that is over, if they do not reach the last step of the run.

    Args:
        folder: the run's folder.
        last_step: the last step that any rank has recorded.
        surely: whether to rewrite the files in any case, because their last steps may lack a rank's rows.

    Raises:
        RunError: `run_info.json` is damaged; the files stay as they are.
    """
    if not (folder / names.INFO).exists():
        return
    if surely or _last_step(folder / METRICS) < last_step:
        # Before the files go: without the info they could not be written again.
        runs.read_info(folder)
        for name in (METRICS, EPOCHS):
            (folder / name).unlink(missing_ok=True)
        MetricsWriter(folder).finish()


def lacks_rows(folder: Path, world_size: int) -> bool:
    """Return whether `metrics.csv` lacks rows of its last step, as where rank 0 wrote them before the records
    of all ranks had arrived."""
    last_step = _last_step(folder / METRICS)
    if not last_step:
        return True
    rows = _last_lines(folder / METRICS)[-world_size:]
    return any(row.split(b",")[0] != str(last_step).encode() for row in rows)


def _last_step(path: Path) -> int:
    """Return the step of the last row of `metrics.csv`; 0 if there is none, or if the row is damaged."""
    if not path.exists():
        return 0
    *_, last = _last_lines(path) or [b""]
    # The length is checked, because a damaged line may consist of any number of digits.
    key = last.split(b",")[0]
    return int(key) if last.endswith(b"\n") and key.isdigit() and len(key) <= _MAX_DIGITS else 0


def _last_lines(path: Path) -> list[bytes]:
    """Return the lines in the last _LAST_LINES_BYTES bytes of a file, with their line breaks. The beginning
    of the first line may be missing."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - _LAST_LINES_BYTES))
        return file.read().splitlines(keepends=True)
