"""Reads CSV files with any of the usual separators, decimal points and encodings. Needs no torch."""

from __future__ import annotations

import codecs
import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbgpu.errors import DataError

_DELIMITERS = (",", ";", "\t", "|")
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_MAX_SHOWN = 20


@dataclass(frozen=True)
class CsvRows:
    """The rows of a CSV file that are not empty."""

    headings: tuple[str, ...]
    rows: tuple[tuple[int, Mapping[str, str]], ...]
    """For each row, the number of its line in the file, and its values by heading, without spaces around
    them."""
    has_decimal_commas: bool
    """Whether numbers may be written as 12,5, because commas do not separate values."""

    def number(self, text: str) -> float | None:
        """Parse a value as a number; None if it is not a number."""
        if self.has_decimal_commas and text.count(",") == 1 and "." not in text:
            text = text.replace(",", ".")
        try:
            return float(text)
        except ValueError:
            return None

    def heading(self, *names: str) -> str | None:
        """Return the first of these headings that the file has, in any case; None where it has none."""
        by_lower_case = {heading.strip().lower(): heading for heading in self.headings}
        lower_case = (name.strip().lower() for name in names)
        return next((by_lower_case[name] for name in lower_case if name in by_lower_case), None)


def read_csv(path: Path) -> CsvRows:
    """Read a CSV file with a line of headings.

    The separator is the one of comma, semicolon, tab and bar that occurs most often in the headings. The
    encoding is that of the byte-order mark, or else UTF-8, or else Windows-1252, which older spreadsheets
    write.

    Raises:
        DataError: the file cannot be read; or a line for each heading that occurs twice, and for each row
            with more values than headings.
    """
    try:
        content = path.read_bytes()
        text = _decoded(content)
        first = next((line for line in text.splitlines() if line.strip()), "")
        delimiter = max(_DELIMITERS, key=first.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        lines = [(reader.line_num, [value.strip() for value in values]) for values in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    lines = [(number, values) for number, values in lines if any(values)]
    headings = lines[0][1] if lines else []
    if problems := list(_problems(headings, lines[1:])):
        raise DataError("\n".join(f"{path}: {problem}" for problem in problems))
    # Spreadsheets leave out empty values at the end of a row.
    padding = [""] * len(headings)
    rows = tuple((n, dict(zip(headings, [*values, *padding], strict=False))) for n, values in lines[1:])
    return CsvRows(tuple(headings), rows, delimiter != ",")


def _decoded(content: bytes) -> str:
    """Decode a file's bytes by its byte-order mark, else as UTF-8, else as Windows-1252."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            return content.decode(encoding)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252")


def _problems(headings: Sequence[str], lines: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    """Return a phrase for each heading that occurs twice, and for each line with more values than headings.

    Args:
        headings: the headings.
        lines: (number of the line, values) of the others.
    """
    counts = Counter(heading.lower() for heading in headings if heading)
    problems = [
        f"has the heading {heading!r} twice. Rename one" for heading, n in sorted(counts.items()) if n > 1
    ]
    longer = [number for number, values in lines if any(values[len(headings) :])]
    problems += [f"line {number}: has more values than the headings" for number in longer[:_MAX_SHOWN]]
    if len(longer) > _MAX_SHOWN:
        problems.append(f"and {len(longer) - _MAX_SHOWN} more such lines")
    return problems
