"""The console of the `nbgpu` command, and text that fits its width."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import Any

from rich.console import Console

_LABEL = re.compile(r"(\s*\S+(?: \S+)*\s{2,})\S")
"""The beginning of a line whose text begins in a column of its own, as in a plan."""


def wrapped(text: str, width: int | None) -> str:
    """Return the text with its lines broken between words, and the rest of each indented below its beginning.

    A word that is longer than a line, such as a path, stays whole, so that it can be copied.

    Args:
        text: lines of text.
        width: in characters; None where there is none, as in a file.
    """
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    """Break a line at the width. The lines after the first begin below the line's own column of text if it
    has one, and else below its beginning."""
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    own = len(line) - len(line.lstrip())
    indent = label.end() - 1 if label and label.end() - 1 <= width // 2 else own + 2
    if own and not label:
        indent = own
    return wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


class CommandConsole(Console):
    """A console that raises BrokenPipeError when its reader stops reading, as `head` does. rich itself would
    end the process with code 1, which stands for a failure."""

    def on_broken_pipe(self) -> Any:
        """Let nothing more be written, and pass the error on."""
        self.quiet = True
        raise BrokenPipeError


def width_of(console: Console) -> int | None:
    """The number of characters in a line of a terminal; None for a file, whose lines have no end."""
    return console.width if console.is_terminal else None


def say(console: Console, text: str, style: str = "") -> None:
    """Print plain text, in a terminal with lines that break between words. rich would break paths at their
    hyphens."""
    console.print(
        wrapped(text, width_of(console)), style=style or None, highlight=False, markup=False, soft_wrap=True
    )
