"""Text that fits a terminal's width, with words, names and paths left whole."""

from __future__ import annotations

import re
from textwrap import wrap

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
