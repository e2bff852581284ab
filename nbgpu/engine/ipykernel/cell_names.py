"""Names of cells: in tracebacks 'Cell In[3], line 2', elsewhere, as in warnings and in tracebacks of threads,
'<ipython-input-3-0d3a5c18e2f4>'.

ipykernel names a cell by a file with the process's number in it, so that the same warning on two ranks would
be two, and nobody would know which cell is meant. IPython's own name is the same on all ranks, and libraries
such as numba and joblib know it. IPython 7 writes this name into tracebacks, too; newer ones write 'Cell
In[3]'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import IPython
from IPython.core.compilerop import code_name

_COLOR = r"(?:\x1b\[[0-9;]*m)*"
_ARROW = re.compile(rf"^{_COLOR}-+> ?{_COLOR}(\d+)", re.MULTILINE)

_numbers: dict[str, int] = {}
"""The number of each cell, by the name of its file."""


def install(shell: Any) -> None:
    """Name cells by their number and code from now on."""

    def name_cell(raw_code: str, _code: str, number: int) -> str:
        name: str = code_name(raw_code, number)
        if IPython.version_info < (8,):
            _numbers[name] = number
        return name

    shell.compile.get_code_name = name_cell


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
