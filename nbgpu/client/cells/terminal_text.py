"""Interpret one stream of one rank as a terminal would: complete lines, and below them rows that still
change.

Progress bars redraw a row again and again after a carriage return, and nested bars move down a line and up
again. Only the final text of a row becomes a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CONTROL = re.compile(r"(\r|\n|\x1b\[\d*[AK])")
_MOVES_BACK = re.compile(r"\r|\x1b\[\d*[AK]")
_BEGUN_CONTROL = re.compile(r"\x1b(\[\d*)?\Z")


@dataclass
class _ScreenRow:
    """One row of the small terminal."""

    text: str = ""
    redrawn: bool = False
    """Whether the row was written from its beginning more than once, as progress bars are."""


class Screen:
    """Turns written text into lines. A row above the cursor becomes a line once the cursor no longer returns
    to it."""

    def __init__(self) -> None:
        self._rows = [_ScreenRow()]
        self._cursor = 0
        self._column = 0
        self._highest = [0, 0]
        """The smallest index of the cursor's row in the period before the last `settle`, and since then."""
        self._last_shown = ""
        self._begun_control = ""
        """The beginning of a control sequence whose rest comes with the next text."""

    def write(self, text: str) -> list[str]:
        """Write printed text, and return the lines that are complete now."""
        text = self._begun_control + text
        begun = _BEGUN_CONTROL.search(text)
        self._begun_control = begun[0] if begun else ""
        text = text.removesuffix(self._begun_control)
        # Plain text, the usual case, is only split into lines.
        if len(self._rows) == 1 and not self._rows[0].redrawn and not _MOVES_BACK.search(text):
            *lines, self._rows[0].text = (self._rows[0].text + text).split("\n")
            self._column = len(self._rows[0].text)
            return lines
        for part in _CONTROL.split(text):
            if part == "\r":
                self._column = 0
                self._rows[self._cursor].redrawn = True
            elif part == "\n":
                self._move_to(self._cursor + 1)
            elif part.startswith("\x1b[") and part.endswith("A"):
                self._move_to(self._cursor - int(part[2:-1] or 1))
            elif part.startswith("\x1b[") and part.endswith("K"):
                self._erase(part[2:-1])
            elif part:
                self._put(part)
        return self._release_rows(self._first_mutable_row())

    def settle(self) -> list[str]:
        """Return as lines the rows to which the cursor has not returned for two calls. Called about ten times
        a second."""
        lines = self._release_rows(min(self._highest))
        self._highest = [self._highest[1], self._cursor]
        return lines

    def pass_by(self) -> list[str]:
        """Return the rows above the cursor as lines, because another stream prints now: they are finished
        progress bars, and come before its text."""
        return self._release_rows(self._cursor)

    def rows(self) -> list[str]:
        """Return the rows that may still change, to be shown below the lines. A single unfinished line is
        left out while it grows."""
        texts = [row.text.rstrip() for row in self._rows]
        is_begun_line = len(self._rows) == 1 and not self._rows[0].redrawn
        last_shown, self._last_shown = self._last_shown, texts[0]
        if is_begun_line and texts[0] != last_shown:
            return []
        return [text for text in texts if text]

    def finish(self) -> list[str]:
        """Return the remaining rows as lines."""
        if not self._rows[-1].text:
            self._rows.pop()
        return self._release_rows(len(self._rows))

    def _move_to(self, row: int) -> None:
        """Move the cursor to the beginning of a row, and add the rows up to it. As in a terminal the cursor
        cannot leave the screen at the top."""
        self._cursor = max(0, row)
        self._column = 0
        self._highest[1] = min(self._highest[1], self._cursor)
        while len(self._rows) <= self._cursor:
            self._rows.append(_ScreenRow())

    def _put(self, text: str) -> None:
        """Write text over the row at the cursor's column."""
        row = self._rows[self._cursor]
        # Colour codes take up no column, so a row with colours is replaced as a whole.
        covers_all = self._column == 0 and ("\x1b" in row.text or "\x1b" in text)
        rest = "" if covers_all else row.text[self._column + len(text) :]
        row.text = row.text[: self._column].ljust(self._column) + text + rest
        self._column += len(text)

    def _erase(self, which: str) -> None:
        """Erase the cursor's row: all of it if `which` is '2', else from the cursor on."""
        row = self._rows[self._cursor]
        row.text = "" if which == "2" else row.text[: self._column]

    def _first_mutable_row(self) -> int:
        """Return the index of the first progress bar, or else of the cursor's row."""
        return next((i for i, row in enumerate(self._rows) if row.redrawn), self._cursor)

    def _release_rows(self, num_rows: int) -> list[str]:
        """Remove the first rows, which no longer change, from the screen; return them as lines."""
        released, self._rows = self._rows[:num_rows], self._rows[num_rows:] or [_ScreenRow()]
        self._cursor = max(0, self._cursor - num_rows)
        self._highest = [max(0, row - num_rows) for row in self._highest]
        # A bar that was cleared leaves an empty row, which is dropped.
        return [
            row.text.rstrip() if row.redrawn else row.text
            for row in released
            if row.text.strip() or not row.redrawn
        ]
