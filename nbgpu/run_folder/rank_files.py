"""A rank's two files in the run's folder: `rankN.jsonl`, with a record in each line, and
`rankN.endpoint.json`, with the address of the socket by which the rank sends the same records during the
run."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from nbgpu.protocol.records import DAMAGE, MAX_NUMBER, PROFILE_PARTS, Event, RunState, Sample, is_time
from nbgpu.run_folder import lines
from nbgpu.run_folder.metrics_table import STEP_SERIES

HEARTBEAT_PERIOD_S = 0.5
HEARTBEAT = b"\n"
"""The message that a rank sends by its socket after HEARTBEAT_PERIOD_S without a new record."""

_FLOAT, _NUMBERS = {float}, {float, int}

Record = Sample | Event


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def endpoint_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.endpoint.json"


def parse(rank: int, line: bytes) -> Record:
    """Parse one line of `rankN.jsonl` as a record.

    Raises:
        ValueError: the line is not what a Recorder writes.
    """
    fields = lines.decode(line)
    try:
        record = Event(rank=rank, **fields) if "kind" in fields else Sample(rank=rank, **fields)
    except TypeError as error:
        raise ValueError(str(error)) from None
    seq, step, time_s = record.seq, record.step, record.time_s
    if type(seq) is not int or type(step) is not int or not (0 <= step <= MAX_NUMBER and is_time(time_s)):
        raise ValueError("seq, time_s or step is not a number of its kind")
    if isinstance(record, Event):
        _require_event(record)
    elif not _are_numbers(record.values):
        raise ValueError("values are not numbers by series")
    return record


def _are_numbers(values: object) -> bool:
    """Return whether the values of a sample are valid. A loss may be NaN or infinite; times and rates of a
    step may not."""
    if type(values) is not dict:
        return False
    types = {*map(type, values.values())}
    # An integer has to fit into a float.
    if not types <= _FLOAT and not (
        types <= _NUMBERS and all(type(v) is float or abs(v) <= MAX_NUMBER for v in values.values())
    ):
        return False
    if STEP_SERIES not in values:
        return True
    by_series: dict[str, float] = values
    get = by_series.get
    # Written out, because a loop over the names would take longer than the rest of `parse`.
    return (
        0 <= by_series[STEP_SERIES] <= MAX_NUMBER
        and 0 <= get("samples_per_s", 0) <= MAX_NUMBER
        and 0 <= get("compute_s", 0) <= MAX_NUMBER
        and 0 <= get("data_s", 0) <= MAX_NUMBER
        and 0 <= get("forward_s", 0) <= MAX_NUMBER
        and 0 <= get("backward_s", 0) <= MAX_NUMBER
        and 0 <= get("optimizer_s", 0) <= MAX_NUMBER
        and 0 <= get("exchange_s", 0) <= MAX_NUMBER
        and 0 <= get("hidden_s", 0) <= MAX_NUMBER
        and 0 <= get("exposed_s", 0) <= MAX_NUMBER
        and 0 <= get("forward_statistics_s", 0) <= MAX_NUMBER
        and 0 <= get("backward_statistics_s", 0) <= MAX_NUMBER
        and 0 <= get("begun_at_s", 0) <= MAX_NUMBER
        and 0 <= get("ready_at_s", 0) <= MAX_NUMBER
    )


def _require_event(event: Event) -> None:
    """Raise ValueError if an event lacks fields that its readers use."""
    if not (isinstance(event.kind, str) and isinstance(event.text, str) and isinstance(event.detail, dict)):
        raise ValueError("kind, text or detail is of another type")
    lines.require_shallow(event.detail)
    if event.kind == "state" and event.text not in get_args(RunState):
        raise ValueError(f"{event.text!r} is not a state")
    if event.kind == "pictures" and not isinstance(event.detail.get("images"), dict):
        raise ValueError("the event has no pictures")
    if event.kind == "profile":
        seconds = [event.detail.get(f"{part}_s") for part in PROFILE_PARTS]
        step_s, steps = event.detail.get("step_s"), event.detail.get("steps")
        if not (all(map(is_time, [step_s, *seconds])) and step_s and type(steps) is list and len(steps) == 2):
            raise ValueError("the event has no times of steps")


def parse_or_mark(rank: int, line: bytes, number: int) -> Record:
    """Parse a line of a file as a record. For a line that cannot be parsed, return an event of the kind
    DAMAGE.

    Args:
        rank: the rank that wrote the file.
        line: the line without its line break.
        number: the number of lines before this one, which becomes the `seq` of a DAMAGE event.
    """
    try:
        return parse(rank, line)
    except ValueError:
        return Event(rank=rank, seq=number, time_s=0.0, step=0, kind=DAMAGE, text="")


class Tail:
    """Reads the records that a rank appends to its file, each once, without keeping them.

    Args:
        folder: the run's folder.
        rank: the rank that writes the file.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = record_path(folder, rank)
        self._rank = rank
        self._offset_bytes = 0
        self._num_lines = 0

    def new(self) -> list[Record]:
        """Return the records since the last call; empty if the rank has not begun to write.

        Raises:
            RunError: the path is not a regular file, or cannot be opened.
        """
        try:
            new, self._offset_bytes = lines.read_new_lines(self._path, self._offset_bytes)
        except FileNotFoundError:
            return []
        begin, self._num_lines = self._num_lines, self._num_lines + len(new)
        return [parse_or_mark(self._rank, line, number) for number, line in enumerate(new, begin)]
