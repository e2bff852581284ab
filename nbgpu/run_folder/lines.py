"""Read the JSON files in a run's folder, which have either one object or a record in each line.

Any of them may be damaged, by a crash of the host, a full disk or an editor. Every kind of damage raises a
ValueError or a RunError here, so that the callers need not handle the many exceptions of a parser.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nbgpu.errors import RunError
from nbgpu.text.ranks import consecutive

_MAX_LEVELS = 100
"""The deepest nesting of lists and objects. Python reads deeper ones, but then fails to write them."""
_MAX_NAMED_RANGES = 10

_raw_decode = json.JSONDecoder().raw_decode


def decode(line: bytes) -> Any:
    """Parse the JSON of a line.

    Raises:
        ValueError: the line is not JSON, or is nested too deeply.
    """
    try:
        # This is a third faster than json.loads, which first detects the encoding.
        text = line.decode().strip()
        # `raw_decode` stops behind the first value; text behind it is an error.
        value, end = _raw_decode(text)
    except RecursionError:
        raise ValueError("too many brackets stand in one another") from None
    if end != len(text):
        raise ValueError("something stands behind its end")
    return value


def require_shallow(value: object, max_levels: int = _MAX_LEVELS) -> None:
    """Raise a ValueError where lists and objects are nested too deeply."""
    if isinstance(value, dict | list):
        if max_levels == 0:
            raise ValueError("too many brackets stand in one another")
        for item in value.values() if isinstance(value, dict) else value:
            require_shallow(item, max_levels - 1)


def whole(batch: bytes) -> list[bytes]:
    """Return the complete lines of a batch, without their line breaks. Text behind the last line break is
    left out: it is still being written, or was cut off."""
    return batch.split(b"\n")[:-1]


def read_new_lines(path: Path, offset_bytes: int) -> tuple[list[bytes], int]:
    """Read the complete lines of a file behind an offset. Return (the lines, the offset behind them).

    Raises:
        FileNotFoundError: the file does not exist.
        RunError: it is a folder, a pipe or the like, or cannot be opened.
    """
    with open_file(path) as file:
        file.seek(offset_bytes)
        batch = file.read()
    return whole(batch), offset_bytes + batch.rfind(b"\n") + 1


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        FileNotFoundError: the file does not exist.
        RunError: it is a folder, a pipe or the like, or cannot be opened.
    """
    try:
        # Opening a pipe would block.
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: PTH123, SIM115
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RunError(f"{path} is not a file, and not what nbgpu writes: remove it")
    return file


def load(path: Path) -> Any:
    """Read a file that holds one JSON value.

    Raises:
        FileNotFoundError: the file does not exist.
        RunError: the file cannot be read, or is not JSON.
    """
    with open_file(path) as file:
        try:
            value = decode(file.read())
            require_shallow(value)
        except ValueError as error:
            raise RunError(f"{path} is not what nbgpu writes ({error})") from None
    return value


def load_lines(path: Path) -> list[dict[str, Any] | None]:
    """Read the JSON objects in a file's complete lines, in order, with None for a line that is not a JSON
    object.

    Raises:
        FileNotFoundError: the file does not exist.
        RunError: it is a folder, a pipe or the like, or cannot be opened.
    """
    with open_file(path) as file:
        return [_object(line) for line in whole(file.read())]


def _object(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None if the line is not an object, or is nested too deeply."""
    try:
        value = decode(line)
        require_shallow(value)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def passed_over(path: Path, numbers: Sequence[int]) -> str:
    """Return a sentence, without a full stop, about the lines of a file that were skipped: at most
    _MAX_NAMED_RANGES ranges of lines are named.

    Args:
        path: the file.
        numbers: the numbers of the lines, counted from 1, ascending; at least one.
    """
    ranges = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in consecutive(numbers)]
    if len(ranges) > _MAX_NAMED_RANGES:
        ranges[_MAX_NAMED_RANGES:] = [f"{len(ranges) - _MAX_NAMED_RANGES} more places"]
    listed = " and ".join([", ".join(ranges[:-1]), ranges[-1]]) if len(ranges) > 1 else ranges[0]
    if len(numbers) == 1:
        return f"line {listed} of {path} is not what nbgpu writes, and was passed over"
    return f"lines {listed} of {path} are not what nbgpu writes, and were passed over"
