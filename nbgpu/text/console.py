"""The console of the `nbgpu` command, and text that fits its width."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import Any

from rich.console import Console

_LABEL = re.compile(r"(\s*\S+(?: \S+)*\s{2,})\S")
"""The beginning of a line with a label and, after two blanks or more, its text, as in a plan."""


def wrapped(text: str, width: int | None) -> str:
    """Return the text with its lines wrapped between words, with a hanging indent.

    A word that is longer than a line, such as a path, stays whole, so that it can be copied.

    Args:
        text: lines of text.
        width: in characters; None for no wrapping, as in a file.
    """
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, width))


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap a line at the width. Further lines are indented to the text behind the line's label; by two blanks
    more than the line itself, if the label takes more than half of the width; and without a label like the
    line itself, or by two blanks if it is not indented."""
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    first_indent = len(line) - len(line.lstrip())
    if label and label.end() - 1 <= width // 2:
        indent = label.end() - 1
    else:
        indent = first_indent if first_indent and not label else first_indent + 2
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
    end the process with exit code 1, which means a failure."""

    def on_broken_pipe(self) -> Any:
        """Stop the output, and raise the error again."""
        self.quiet = True
        raise BrokenPipeError


def width_of(console: Console) -> int | None:
    """Return the width of a terminal in characters; None for a file, which has no width."""
    return console.width if console.is_terminal else None


def say(console: Console, text: str, style: str = "") -> None:
    """Print plain text, in a terminal wrapped between words. rich would also wrap paths at their hyphens."""
    console.print(
        wrapped(text, width_of(console)), style=style or None, highlight=False, markup=False, soft_wrap=True
    )
