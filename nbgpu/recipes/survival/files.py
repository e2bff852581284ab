"""Reads cohorts from CSV files: a volume, a time, an event and optional features for each patient. Needs no
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbgpu.errors import DataError
from nbgpu.machine.files import without_parent_steps
from nbgpu.planning.csv_rows import CsvRows, read_csv
from nbgpu.recipes.survival.config import Role

IMAGE_COLUMNS = ("nifti path", "image", "path", "file", "filename", "filepath", "nifti", "volume")
"""Headings of the column with the volumes' files, in any case; the first heading present counts."""
PATIENT_COLUMNS = ("patient", "patient_id", "id", "mrn")
"""Headings of the column that identifies the patient, in any case. Without such a column each file is a
patient."""
_HEADINGS: Mapping[Role, tuple[str, ...]] = {
    "image": IMAGE_COLUMNS,
    "time": ("time",),
    "event": ("event",),
    "patient": PATIENT_COLUMNS,
}

_EVENTS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_WORDS = {
    **dict.fromkeys(("train", "training"), "training"),
    **dict.fromkeys(("val", "validation", "held out"), "validation"),
    "test": "test",
}
"""The part of the data by the text in the column `fold`."""
_MAX_SHOWN = 20
_GAP, _SHARE = 10.0, 0.1
"""A time that is more than `_GAP` times the next smaller one, with at least the share `_SHARE` of all times
on either side, is a sign that some times are in another unit."""


@dataclass(frozen=True)
class PatientRow:
    """A patient's examination."""

    image: Path
    time: float
    """The time to the event, or to the end of the observation."""
    event: bool
    features: tuple[float, ...]
    """In the order of the requested columns, as in the file."""
    patient: str
    part: str
    """'training', 'validation' or 'test'; empty where the table has no column for it."""


def read_table(
    path: Path,
    fold: str,
    features: Sequence[str],
    image_problem: Callable[[Path], str | None],
    check_time_unit: bool = True,
    columns: Mapping[Role, str] | None = None,
) -> list[PatientRow]:
    """Read the rows of a cohort's CSV file.

    Args:
        path: a file with a heading for the volume (IMAGE_COLUMNS; paths are relative to the file), 'time' and
            'event' (0 or 1).
        fold: the heading of the column that says 'train', 'val' or 'test' for each row; empty for none.
        features: headings of columns with numbers that go to the network beside the volume.
        image_problem: a function that returns what is wrong with a volume's file, or None.
        check_time_unit: whether to reject times with a gap as if some were in days and some in years.
        columns: the headings of columns that have other names.

    Raises:
        DataError: lists every problem, one line for each bad row.
    """
    table = _read(path)
    reading = _Reading(path, table, fold, features, image_problem, columns or {})
    lines, problems = reading.valid_lines()
    rows = [(number, reading.row(line)) for number, line in lines]
    problems += [f"{path}: {problem}" for problem in _problems_of_all(rows, fold)]
    if check_time_unit:
        problems += [f"{path}: {problem}" for problem in _problems_of_unit(rows)]
    if not table.rows:
        problems.append(f"{path}: has no rows")
    if problems:
        raise DataError("\n".join(problems))
    return [row for _, row in rows]


@dataclass(frozen=True)
class NewPatient:
    """A patient for whom a risk is to be predicted."""

    image: Path
    features: tuple[float, ...]
    """In the order of the requested columns, as in the file."""
    time: float | None
    """None where the table has no outcomes."""
    event: bool | None


def read_new(
    path: Path,
    features: Sequence[str],
    image_problem: Callable[[Path], str | None],
    columns: Mapping[Role, str] | None = None,
) -> tuple[list[NewPatient], list[str]]:
    """Read a table of patients whose outcomes need not be known.

    Args:
        path: a file with a heading for the volume (IMAGE_COLUMNS; paths are relative to the file), and 'time'
            and 'event' or neither.
        features: headings of columns with numbers that go to the network beside the volume.
        image_problem: a function that returns what is wrong with a volume's file, or None.
        columns: the headings of columns that have other names.

    Returns:
        The good rows, and a line for each bad one.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    table = _read(path)
    names = _names(columns or {})
    has_outcomes = table.heading(*names["time"], *names["event"]) is not None
    reading = _Reading(path, table, "", features, image_problem, columns or {}, has_outcomes)
    lines, problems = reading.valid_lines()
    return [reading.new(line) for _, line in lines], problems


def _read(path: Path) -> CsvRows:
    """Read the CSV file; DataError if there is none."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. data takes 'generated' or a .csv file")
    if path.suffix.lower() not in (".csv", ".tsv"):
        raise DataError(f"{path}: is not a .csv file. data takes 'generated' or a .csv file")
    return read_csv(path)


def _names(columns: Mapping[Role, str]) -> dict[Role, tuple[str, ...]]:
    """Return the headings that a column with each role may have."""
    return {**_HEADINGS, **{role: (heading,) for role, heading in columns.items()}}


class _Reading:
    """Checks and parses the lines of one CSV file."""

    def __init__(
        self,
        path: Path,
        table: CsvRows,
        fold: str,
        features: Sequence[str],
        image_problem: Callable[[Path], str | None],
        columns: Mapping[Role, str],
        with_outcomes: bool = True,
    ) -> None:
        """Find the columns of a table by their headings.

        Args:
            path: the CSV file; paths of volumes in it are relative to its folder.
            table: its rows and headings.
            fold: the heading of the column with the parts; empty for none.
            features: headings of columns with numbers.
            image_problem: returns what is wrong with a volume's file, or None.
            columns: by role, the heading of a column that is not one of the usual ones.
            with_outcomes: whether each line has a time and an event.

        Raises:
            DataError: names all columns that are missing.
        """
        self._path = path
        self._table = table
        self._image_problem = image_problem
        self._parse_number = table.number
        names = _names(columns)
        # The columns that must be there: volumes, outcomes and all columns that the settings name, also that
        # of the patients, which is optional otherwise. Without outcomes only the volumes and the features.
        roles: list[Role] = ["image", *(("time", "event", *columns) if with_outcomes else ())]
        required = [
            *(names[role] for role in dict.fromkeys(roles)),
            *((name,) for name in (fold, *features) if name),
        ]
        if missing := [" or ".join(map(repr, one)) for one in required if table.heading(*one) is None]:
            raise DataError(
                f"{path}: has no column {', '.join(missing)}. Its headings are: {', '.join(table.headings) or '(none)'}. "
                "Where columns have other names, say so: columns=('time=OS_days', 'image=ct_path')"
            )
        headings = {role: table.heading(*possible) or "" for role, possible in names.items()}
        self._image = headings["image"]
        self._outcome = (headings["time"], headings["event"]) if with_outcomes else None
        self._fold = table.heading(fold) if fold else None
        self._features = [table.heading(name) or "" for name in features]
        self._patient = headings["patient"] or self._image

    def valid_lines(self) -> tuple[list[tuple[int, Mapping[str, str]]], list[str]]:
        """Return (the number and the values of each line without problems, a message for each problem of the
        other lines)."""
        valid, problems = [], []
        for number, line in self._table.rows:
            if wrong := list(self._problems(line)):
                problems += [f"{self._path}: line {number}: {problem}" for problem in wrong]
            else:
                valid.append((number, line))
        return valid, problems

    def _problems(self, line: Mapping[str, str]) -> Iterator[str]:
        """Yield the problems of a line."""
        if not line[self._image]:
            yield f"{self._image} is empty"
        elif not line[self._patient]:
            yield f"{self._patient} is empty"
        elif problem := self._image_problem(self._image_path(line)):
            yield f"{self._image_path(line)}: {problem}"
        if self._outcome is not None:
            yield from self._outcome_problems(line, *self._outcome)
        if self._fold is not None and not self._part(line):
            yield f"{self._fold} is {line[self._fold]!r}, and must be 'train', 'val' or 'test'"
        for name in self._features:
            value = self._parse_number(line[name])
            if value is None or not math.isfinite(value):
                yield f"{name} is {line[name]!r}, not a number"

    def _outcome_problems(
        self, line: Mapping[str, str], time_heading: str, event_heading: str
    ) -> Iterator[str]:
        """Yield a message if the time of a line is not a number above 0, or its event neither 0 nor 1."""
        time = self._parse_number(line[time_heading])
        if time is None or not math.isfinite(time):
            yield f"{time_heading} is {line[time_heading]!r}, not a number"
        elif time <= 0:
            yield f"{time_heading} is {time:g}, and must be above 0"
        if line[event_heading].lower() not in _EVENTS:
            yield f"{event_heading} is {line[event_heading]!r}, and must be 0 or 1"

    def row(self, line: Mapping[str, str]) -> PatientRow:
        """Parse a line without problems."""
        new = self.new(line)
        assert new.time is not None
        assert new.event is not None
        return PatientRow(new.image, new.time, new.event, new.features, line[self._patient], self._part(line))

    def new(self, line: Mapping[str, str]) -> NewPatient:
        """Parse a line without problems, which may lack the outcome."""
        features = tuple(self._valid_number(line[name]) for name in self._features)
        if self._outcome is None:
            return NewPatient(self._image_path(line), features, None, None)
        time, event = (line[heading] for heading in self._outcome)
        return NewPatient(self._image_path(line), features, self._valid_number(time), _EVENTS[event.lower()])

    def _part(self, line: Mapping[str, str]) -> str:
        """Return 'training', 'validation' or 'test', or an empty string if the line does not say."""
        return _WORDS.get(line[self._fold].lower(), "") if self._fold is not None else ""

    def _valid_number(self, text: str) -> float:
        number = self._parse_number(text)
        assert number is not None
        return number

    def _image_path(self, line: Mapping[str, str]) -> Path:
        return without_parent_steps(self._path.parent / Path(line[self._image]).expanduser())


def _problems_of_all(numbered_rows: Sequence[tuple[int, PatientRow]], fold: str) -> Iterator[str]:
    """Yield the problems of rows that are valid individually but not together, such as an image that two rows
    name, or a part without an event.

    Args:
        numbered_rows: (number of the line, row) of each valid line.
        fold: the heading of the column with the parts; empty for none.
    """
    lines_of: dict[Path, list[int]] = {}
    parts_of: dict[str, dict[str, list[int]]] = {}
    for number, row in numbered_rows:
        lines_of.setdefault(row.image, []).append(number)
        parts_of.setdefault(row.patient, {}).setdefault(row.part, []).append(number)
    for image, numbers in lines_of.items():
        if len(numbers) > 1:
            yield f"lines {', '.join(map(str, numbers))}: all name {image}"
    for patient, parts in parts_of.items():
        if len(parts) > 1:
            places = "; ".join(f"{part} in line {', '.join(map(str, n))}" for part, n in parts.items())
            yield f"patient {patient!r} is in several parts of {fold}: {places}"
    named = {row.part for _, row in numbered_rows}
    if fold and numbered_rows and not named & {"validation", "test"}:
        yield f"no row is held out in {fold}"
    for part in sorted({"training", *named}) if fold else ("",):
        rows = [row for _, row in numbered_rows if row.part == part]
        among = f" of {part} in {fold}" if fold else ""
        if numbered_rows and not rows:
            yield f"no row is{among}"
        elif numbered_rows and not any(row.event for row in rows):
            yield f"none of the {len(rows)} rows{among} has the event: nothing can be learned or measured"
    times = {row.time for _, row in numbered_rows}
    if len(numbered_rows) > 1 and len(times) == 1:
        yield f"all times are {times.pop():g}, so that nobody comes before anybody else"


def _problems_of_unit(numbered_rows: Sequence[tuple[int, PatientRow]]) -> Iterator[str]:
    """Yield a message if there is a gap of more than a factor of 10 between neighbouring times, with at least
    3 rows and a tenth of all rows on each side: probably some times are in days and others in years.

    Args:
        numbered_rows: (number of the line, row) of each valid line.
    """
    in_order = sorted((row.time, number) for number, row in numbered_rows)
    margin = max(3, math.ceil(_SHARE * len(in_order)))
    for first in range(margin, len(in_order) - margin + 1):
        below, above = in_order[first - 1][0], in_order[first][0]
        if above > _GAP * below:
            # The smaller group has the lines that are probably in the wrong unit.
            fewer = in_order[:first] if first <= len(in_order) / 2 else in_order[first:]
            lines = ", ".join(map(str, sorted(number for _, number in fewer)[:_MAX_SHOWN]))
            more = f" and {len(fewer) - _MAX_SHOWN} more" if len(fewer) > _MAX_SHOWN else ""
            yield (
                f"no time is between {below:g} and {above:g}, as if some were in another unit, in lines {lines}{more}. "
                "Give all in one, or set check_time_unit=False"
            )
            return
