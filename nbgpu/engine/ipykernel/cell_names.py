"""Names of cells in the tracebacks of IPython 7.

It names a cell by a file with the process's number in it, so that the same error on two ranks would be two,
and nobody would know which cell is meant. Here cells are named as IPython 8 and newer name them: 'Cell In[3],
line 2'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import IPython

_COLOR = r"(?:\x1b\[[0-9;]*m)*"
_ARROW = re.compile(rf"^{_COLOR}-+> ?{_COLOR}(\d+)", re.MULTILINE)

_numbers: dict[str, int] = {}
"""The number of each cell, by the name of its file."""


def install(shell: Any) -> None:
    """Note the number of each cell from now on; nothing where IPython knows it."""
    if IPython.version_info >= (8,):
        return
    name_of = shell.compile.get_code_name

    def noted(raw_code: str, code: str, number: int) -> str:
        name: str = name_of(raw_code, code, number)
        _numbers[name] = number
        return name

    shell.compile.get_code_name = noted


def put_in(lines: Sequence[str]) -> list[str]:
    """Return the parts of a traceback, each a frame or a line, with the names of cells."""
    return [_named(part) for part in lines] if _numbers else [*lines]


def _named(part: str) -> str:
    for name, number in _numbers.items():
        if name not in part:
            continue
        arrow = _ARROW.search(part)
        cell = f"Cell In[{number}]"
        # The header of a frame: its line stands beside the arrow below.
        header = rf"{_COLOR}{re.escape(name)}{_COLOR} in {_COLOR}(?P<function>[^\x1b(\n]+)"
        part = re.sub(
            rf"{header}{_COLOR}(?P<arguments>\([^\n]*\))",
            lambda found, cell=cell, arrow=arrow: _frame(cell, arrow, found),  # type: ignore[misc]
            part,
        )
        part = re.sub(rf'File {_COLOR}"{re.escape(name)}"{_COLOR}, line', f"{cell}, line", part)
        part = part.replace(name, cell)
    return part


def _frame(cell: str, arrow: re.Match[str] | None, found: re.Match[str]) -> str:
    place = f"{cell}, line {arrow[1]}" if arrow else cell
    if found["function"].startswith(("<cell line", "<module>")):
        return place
    return f"{place}, in {found['function']}{found['arguments']}"
