"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Container, Sequence

_GAP = "  "


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return one line for each row, with the cells of a column below one another.

    Args:
        rows: the headings first, if there are any. All rows are of the same length.
        right: the columns whose cells end below one another instead, such as numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
