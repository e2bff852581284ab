"""The ranks' variables side by side, with a mark where the ranks differ."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nbgpu.client.engines.calls import reference
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import Variable
from nbgpu.text.ranks import named_ranges, rank_ranges, ranks_by
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

_HEADINGS = ("name", "rank", "type", "shape", "dtype", "device", "bytes", "content", "ranks differ")
_MAX_ROWS_OF_A_NAME = 5
"""The most rows of one name: a number that differs on each of 64 ranks does not take 64 rows."""
_RIGHT_ALIGNED = "bytes"


def table(apply: Callable[..., Mapping[int, Sequence[Variable]]], pattern: str) -> VariableTable:
    """Ask every rank for its variables whose names match.

    Args:
        apply: the cluster's method `apply`.
        pattern: the pattern of the names, with * and ?.

    Raises:
        RunError: a training run has the ranks now.
    """
    return VariableTable(apply(reference(Call.DESCRIBE_VARIABLES), pattern))


@dataclass(frozen=True)
class VariableRow:
    """One variable, on all ranks that show it in the same way."""

    ranks: tuple[int, ...]
    variable: Variable
    differs: str
    """How the variable differs between ranks, such as 'shape'; empty if it does not."""


class VariableTable:
    """The table that `%nbgpu vars` shows.

    Args:
        by_rank: the variables of each rank.
    """

    def __init__(self, by_rank: Mapping[int, Sequence[Variable]]) -> None:
        self._ranks = sorted(by_rank)
        by_name: dict[str, dict[int, Variable]] = {}
        for rank in self._ranks:
            for variable in by_rank[rank]:
                by_name.setdefault(variable.name, {})[rank] = variable
        self.rows = [row for name in sorted(by_name) for row in self._rows_of(by_name[name])]

    def frame(self) -> pd.DataFrame:
        """Return a frame with one row for each variable and rank."""
        # The import takes a third of a second, so a start of a cluster does without it.
        import pandas as pd

        rows = []
        for row in self.rows:
            v = row.variable
            cells = (v.type, v.shape, v.dtype, v.device, v.num_bytes, v.content, row.differs)
            rows += [(v.name, rank, *cells) for rank in row.ranks]
        frame = pd.DataFrame(rows, columns=list(_HEADINGS)).astype({"bytes": "Int64"})
        return frame.sort_values(["name", "rank"], ignore_index=True)

    def _rows_of(self, by_rank: Mapping[int, Variable]) -> list[VariableRow]:
        """Return the rows of one name: one for each group of ranks that show the variable in the same way."""
        differs = _difference(by_rank, self._ranks)
        groups = ranks_by((_compared_columns(variable), rank) for rank, variable in by_rank.items())
        return [VariableRow(tuple(ranks), by_rank[ranks[0]], differs) for ranks in groups.values()]

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the texts of the table's cells, row by row."""
        lines: list[tuple[str, ...]] = []
        for name, rows_of_name in groupby(self.rows, lambda row: row.variable.name):
            rows = list(rows_of_name)
            for row in rows[:_MAX_ROWS_OF_A_NAME]:
                v = row.variable
                size = "" if v.num_bytes is None else in_words(v.num_bytes).replace("bytes", "B")
                ranks = "all" if len(row.ranks) == len(self._ranks) else rank_ranges(row.ranks)
                device = _device(v.device, row.ranks)
                mark = f"≠ {row.differs}" if row.differs else ""
                lines.append((name, ranks, v.type, v.shape, v.dtype, device, size, v.content, mark))
            if len(rows) > _MAX_ROWS_OF_A_NAME:
                rest = [rank for row in rows[_MAX_ROWS_OF_A_NAME:] for rank in row.ranks]
                lines.append((name, rank_ranges(rest), "...", "", "", "", "", "", f"≠ {rows[0].differs}"))
        return lines

    def __str__(self) -> str:
        """Return the table as text, without the columns that are empty for every variable."""
        lines = self._cells()
        if not lines:
            return "the ranks have no variables of such a name"
        used = [i for i in range(len(_HEADINGS)) if any(line[i] for line in lines)]
        table = [[row[i] for i in used] for row in (_HEADINGS, *lines)]
        right = [at for at, column in enumerate(used) if _HEADINGS[column] == _RIGHT_ALIGNED]
        return "\n".join(aligned(table, right))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the table as HTML, without the columns that are empty for every variable."""
        lines = self._cells()
        if not lines:
            return html.escape(str(self))
        used = [i for i in range(len(_HEADINGS)) if any(line[i] for line in lines)]

        def cells(row: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align: {"right" if _HEADINGS[i] == _RIGHT_ALIGNED else "left"}'
                f'{"; font-weight: bold" if _HEADINGS[i] == "ranks differ" else ""}">{html.escape(row[i])}</{tag}>'
                for i in used
            )

        body = "".join(f"<tr>{cells(line, 'td')}</tr>" for line in lines)
        return f"<table><thead><tr>{cells(_HEADINGS, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _compared_columns(variable: Variable) -> tuple[Any, ...]:
    """Return the columns by which ranks are grouped. The index of a rank's GPU is not a difference."""
    v = variable
    return v.type, v.shape, v.dtype, v.device.partition(":")[0], v.num_bytes, v.content


def _difference(by_rank: Mapping[int, Variable], ranks: Sequence[int]) -> str:
    """Return the respects in which a variable differs between the ranks; empty if it does not, or if its
    values were not compared.

    Args:
        by_rank: the variable on each rank that has it.
        ranks: all ranks.
    """
    variables = list(by_rank.values())

    def differ(column: Callable[[Variable], Any]) -> bool:
        return any(column(variable) != column(variables[0]) for variable in variables)

    columns: dict[str, Callable[[Variable], Any]] = {
        "type": lambda v: v.type,
        "shape": lambda v: v.shape,
        "dtype": lambda v: v.dtype,
        "device": lambda v: v.device.partition(":")[0],
    }
    differences = [name for name, column in columns.items() if differ(column)]
    if not differences:
        # Values are compared by their fingerprints. A variable without one is compared by its size.
        has_fingerprints = all(variable.fingerprint for variable in variables)
        if has_fingerprints and differ(lambda v: v.fingerprint):
            differences.append("value")
        elif not has_fingerprints and differ(lambda v: (v.content, v.num_bytes)):
            differences.append("size")
    if without := [rank for rank in ranks if rank not in by_rank]:
        differences.insert(0, f"not on {named_ranges(without)}")
    return ", ".join(differences)


def _device(device: str, ranks: Sequence[int]) -> str:
    """Return the device, or 'cuda of each' if several ranks have the variable, each on its own GPU."""
    kind, colon, _ = device.partition(":")
    return f"{kind} of each" if colon and len(ranks) > 1 else device
