"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Container, Sequence

_GAP = "  "


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = (), width: int | None = None) -> list[str]:
    """Return one line for each row, with aligned columns.

    If the lines would be longer than `width`, each row becomes a block with a line for each of its cells,
    which begins with the heading of the column, so that no cell is truncated.

    Args:
        rows: the headings first, if there are any. All rows have the same length.
        right: the columns that are aligned on the right, such as numbers.
        width: in characters; None for no limit, as in a file.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        return _in_blocks(rows)
    return [
        _GAP.join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _in_blocks(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the table as blocks of lines, one block for each row; empty cells are left out."""
    (first, *headings), *others = rows
    widest = max(map(len, headings), default=0)
    lines = []
    for name, *cells in others:
        lines.append(f"{first} {name}".strip())
        lines += [
            f"{_GAP}{heading.ljust(widest)}{_GAP}{cell}"
            for heading, cell in zip(headings, cells, strict=True)
            if cell
        ]
    return lines
