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
from nbgpu.text.ranks import named_ranges, rank_ranges
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

_HEADINGS = ("name", "rank", "type", "shape", "dtype", "device", "bytes", "content", "ranks differ")
_MAX_ROWS_OF_A_NAME = 5
"""The most rows of one name, so that a number which differs on each of 64 ranks does not take 64 rows."""
_RIGHT_ALIGNED = "bytes"


def table(apply: Callable[..., Mapping[int, Sequence[Variable]]], pattern: str) -> VariableTable:
    """Ask every rank for the variables whose names match; RunError while a training run has the ranks.

    Args:
        apply: the cluster's method `apply`.
        pattern: the pattern of the names, with * and ?.
    """
    return VariableTable(apply(reference(Call.DESCRIBE_VARIABLES), pattern))


@dataclass(frozen=True)
class VariableRow:
    """One variable on the ranks on which it looks the same."""

    ranks: tuple[int, ...]
    variable: Variable
    differs: str
    """The parts in which the variable differs between ranks, such as 'shape'; empty if it does not differ."""


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
        """A frame with one row for each variable and rank."""
        # pandas is imported here, because that takes a third of a second, which would slow every start of a
        # cluster.
        import pandas as pd

        rows = [
            (v.name, rank, v.type, v.shape, v.dtype, v.device, v.num_bytes, v.content, row.differs)
            for row in self.rows
            for rank in row.ranks
            for v in [row.variable]
        ]
        frame = pd.DataFrame(rows, columns=list(_HEADINGS)).astype({"bytes": "Int64"})
        return frame.sort_values(["name", "rank"], ignore_index=True)

    def _rows_of(self, there: Mapping[int, Variable]) -> list[VariableRow]:
        """Return one row for each group of ranks on which a variable looks the same."""
        differs = _difference(there, self._ranks)
        alike: dict[Any, list[int]] = {}
        for rank, variable in there.items():
            alike.setdefault(_face(variable), []).append(rank)
        return [VariableRow(tuple(ranks), there[ranks[0]], differs) for ranks in alike.values()]

    def _cells(self) -> list[tuple[str, ...]]:
        """The table's text, row by row."""
        lines: list[tuple[str, ...]] = []
        for name, of_name in groupby(self.rows, lambda row: row.variable.name):
            rows = list(of_name)
            for row in rows[:_MAX_ROWS_OF_A_NAME]:
                v = row.variable
                size = "" if v.num_bytes is None else in_words(v.num_bytes)
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


def _face(variable: Variable) -> tuple[Any, ...]:
    """The columns by which variables are compared. The number of a rank's GPU is not a difference."""
    kind = variable.device.partition(":")[0]
    return variable.type, variable.shape, variable.dtype, kind, variable.num_bytes, variable.content


def _difference(there: Mapping[int, Variable], ranks: Sequence[int]) -> str:
    """Return in which parts a variable differs between the ranks; empty if it does not, or if values were not
    compared."""
    without = [rank for rank in ranks if rank not in there]
    variables = list(there.values())

    def differ(values: Sequence[Any]) -> bool:
        return any(value != values[0] for value in values)

    found = ["type"] if differ([v.type for v in variables]) else []
    found += [what for what in ("shape", "dtype") if differ([getattr(v, what) for v in variables])]
    if differ([v.device.partition(":")[0] for v in variables]):
        found.append("device")
    if not found:
        compared = all(v.fingerprint for v in variables)
        if compared and differ([v.fingerprint for v in variables]):
            found.append("value")
        elif not compared and differ([(v.content, v.num_bytes) for v in variables]):
            found.append("size")
    if without:
        found.insert(0, f"not on {named_ranges(without)}")
    return ", ".join(found)


def _device(device: str, ranks: Sequence[int]) -> str:
    """The device in words. Where several ranks have the variable, each has it on its own GPU."""
    kind, colon, _ = device.partition(":")
    return f"{kind} of each" if colon and len(ranks) > 1 else device


def in_words(num_bytes: int) -> str:
    """A size in words: '512 B', '1.5 MiB'."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
