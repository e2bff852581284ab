"""The folder in which a trained model's predictions for new data are collected.

    predictions.csv      one row for each sample: its values, its files, or why it failed
    predict.json         the job: which model, which data, which settings
    rows/1-rank0.jsonl   the rows of rank 0 from the first attempt at the job; the table is made from the rows
                         of all ranks and attempts

A job that was interrupted goes on with the samples that have no row yet. Needs no torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nbgpu.errors import ConfigError
from nbgpu.machine.files import write_whole
from nbgpu.run_folder import lines

TABLE = "predictions.csv"
JOB = "predict.json"
_ROWS = "rows"
_IDENTITY = ("run_folder", "checkpoint", "data", "settings")
"""The fields that decide what a job predicts. A job that differs in one of them cannot go on in the same
folder."""


@dataclass(frozen=True)
class Job:
    """A prediction to do: the data, the model and the output folder. It travels to the ranks as JSON."""

    run_folder: str
    checkpoint: str
    """The folder of the checkpoint."""
    data: str
    out: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings that are replaced for the prediction."""
    max_samples: int | None = None
    skip_bad: bool = False
    trust: bool = False
    attempt: int = 1
    """How often the job was begun, this time included."""


@dataclass(frozen=True)
class Row:
    """The result for one sample."""

    name: str
    rank: int
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its columns in the table."""
    files: Sequence[str] = ()
    """Its files in the output folder."""
    aside: Mapping[str, Any] = field(default_factory=dict)
    """Values that the table does not show, for the recipe's `conclude`, which compares all samples."""
    failed: str = ""
    """Why there is no prediction; empty if there is one."""
    is_reference: bool = False
    """Whether the sample is one of the training data, which `conclude` compares the new samples with."""
    seconds: float = 0.0


def begin(job: Job) -> Job:
    """Make the folder of a job, or check that an existing folder has an earlier attempt of the same job.
    Return the job with the number of this attempt.

    Raises:
        ConfigError: the folder has something else in it, or cannot be written to.
    """
    out = Path(job.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            _require_same(job)
        else:
            write_whole(out / JOB, json.dumps(asdict(job), indent=2) + "\n")
        (out / _ROWS).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out = {job.out!r} cannot be written to: {error.strerror}. Give another folder"
        ) from None
    attempts = (_attempt_key(path)[0] for path in (out / _ROWS).glob("*-rank*.jsonl"))
    return replace(job, attempt=max(attempts, default=0) + 1)


def _require_same(job: Job) -> None:
    """Raise ConfigError if the job's folder has other content than predictions of the same model, data and
    settings."""
    out = Path(job.out)
    try:
        existing = lines.load(out / JOB)
    except FileNotFoundError:
        raise ConfigError(
            f"out = {job.out!r}: the folder is not empty, and it has no predictions. Give another one"
        ) from None
    wanted = json.loads(json.dumps(asdict(job)))
    if not isinstance(existing, dict):
        raise ConfigError(f"out = {job.out!r}: {JOB} there is not what nbgpu writes. Give another out")
    if different := [name for name in _IDENTITY if existing.get(name) != wanted[name]]:
        differences = "; ".join(
            f"{name} is {existing.get(name)!r} there and {wanted[name]!r} now" for name in different
        )
        raise ConfigError(
            f"out = {job.out!r} has the predictions of another job: {differences}. Give another out"
        )


class RowWriter:
    """Writes a rank's rows, one by one, so that after a crash of the rank all rows before it are in the file.

    The first line has the number of samples that all ranks have to do together in this attempt.
    """

    def __init__(self, job: Job, rank: int, num_samples: int) -> None:
        folder = Path(job.out) / _ROWS
        folder.mkdir(exist_ok=True)  # a copy of the output folder begins empty
        self._file = (folder / f"{job.attempt}-rank{rank}.jsonl").open("x")
        self._write({"num_samples": num_samples})

    def add(self, row: Row) -> None:
        """Write a row."""
        self._write(asdict(row))

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def rows(job: Job) -> list[Row]:
    """Return the rows of all attempts. A sample that failed in an earlier attempt has only its newest row."""
    newest: dict[tuple[bool, str], Row] = {}
    for path in sorted((Path(job.out) / _ROWS).glob("*-rank*.jsonl"), key=_attempt_key):
        for record in lines.load_lines(path):
            if record is not None and "name" in record:
                row = Row(**record)
                newest[row.is_reference, row.name] = row
    return list(newest.values())


def _attempt_key(path: Path) -> tuple[int, str]:
    """Return the number of the attempt that wrote a file of rows, with the file's name as a sort key."""
    return int(path.name.partition("-")[0]), path.name


@dataclass
class Progress:
    """The progress of the ranks in the present attempt."""

    num_samples: int | None = None
    """How many there are to do; None before a rank knows."""
    num_done: int = 0
    num_failed: int = 0
    newest: str = ""
    """The name of the sample that was finished last."""


class ProgressReader:
    """Reads the progress of the ranks from their rows, each row once."""

    def __init__(self, job: Job) -> None:
        self._folder = Path(job.out) / _ROWS
        self._attempt = job.attempt
        self._offsets_bytes: dict[Path, int] = {}
        self.progress = Progress()

    def read(self) -> Progress:
        """Return the progress up to now."""
        for path in sorted(self._folder.glob(f"{self._attempt}-rank*.jsonl")):
            for record in self._new_records(path):
                if "num_samples" in record:
                    self.progress.num_samples = int(record["num_samples"])
                else:
                    self.progress.num_done += 1
                    self.progress.num_failed += bool(record.get("failed"))
                    self.progress.newest = str(record["name"])
        return self.progress

    def _new_records(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the records that were added to a rank's file since the last call; an incomplete last line is
        left for the next one."""
        new, self._offsets_bytes[path] = lines.read_new_lines(path, self._offsets_bytes.get(path, 0))
        for line in new:
            # A damaged line does not count as a sample.
            with suppress(ValueError):
                record = lines.decode(line)
                if isinstance(record, dict) and record.keys() & {"num_samples", "name"}:
                    yield record


def write_table(out: Path, rows: Sequence[Row]) -> Path:
    """Write `predictions.csv`, with a column for each value that a row has, and return its path."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["name", *columns, "files", "failed"])
    for row in rows:
        # None becomes an empty cell.
        table.writerow([row.name, *map(row.values.get, columns), "; ".join(row.files), row.failed])
    path = out / TABLE
    write_whole(path, text.getvalue())
    return path
