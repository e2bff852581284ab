"""A recipe's result as HTML and as text: the note, the table that compares it with baselines, and the
pictures.

The notebook, the panel of a run that is over and the report show a result in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbgpu.text.tables import aligned
from nbgpu.ui.run.html_parts import columns_of, escape, is_table, pictures, table

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run


def html(result: Mapping[str, Any]) -> str:
    """A result as HTML: the note first, then each table, each picture, and a line for everything else."""
    note = result.get("note")
    parts = [f"<p>{escape(note)}</p>"] if note else []
    for name, value in result.items():
        if name == "images" and isinstance(value, Mapping):
            parts.append(pictures(value))
        elif is_table(value):
            parts.append(table(*_header_and_rows(value)))
        elif name != "note" and not _is_empty(value):
            parts.append(f"<p>{escape(name)}: {escape(value)}</p>")
    return "".join(parts)


def text(result: Mapping[str, Any], width: int | None = None) -> str:
    """Return a result as plain text, with the names of the pictures.

    Args:
        result: the result.
        width: the characters of a line; a wider table is transposed. None for no limit.
    """
    parts = [str(result["note"])] if result.get("note") else []
    for name, value in result.items():
        if name == "images" and isinstance(value, Mapping):
            if value:
                parts.append(f"pictures: {', '.join(map(str, value))}")
        elif is_table(value):
            header, rows = _header_and_rows(value)
            cells = [header, *([_cell(value) for value in row] for row in rows)]
            parts.append("\n".join(aligned(cells, range(1, len(header)), width)))
        elif name != "note" and not _is_empty(value):
            parts.append(f"{name}: {value}")
    return "\n\n".join(parts)


def _header_and_rows(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The header and the rows of a table, each row with its name in the first column."""
    columns = columns_of(rows)
    return ["", *columns], [
        [name, *(row.get(column, "") for column in columns)] for name, row in rows.items()
    ]


def bundle(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as an output that a notebook keeps."""
    return {"text/html": html(result), "text/plain": text(result)}


def show(run: Run, result: Mapping[str, Any]) -> None:
    """Display the result of a run below the cell, or print it where there is no notebook."""
    # A report shows results, too, and needs no IPython.
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(text(result))  # noqa: T201 - a script asked for it
    else:
        display(bundle(result), raw=True, metadata={"nbgpu": {"result": run.info.run_id}})


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and not value


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
