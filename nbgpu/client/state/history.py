"""The cells that ranks have run, from which a rank that replaces a lost one gets its variables back."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbgpu.client.engines.results import collect
from nbgpu.errors import RankError


class CellHistory:
    """The code that was sent to each rank, so that the rank's replacement can run it again."""

    def __init__(self) -> None:
        self._cells: dict[int, list[str]] = {}
        self._newest: dict[int, list[str]] = {}
        """The cells of the ranks that were sent the newest cell, by the numbers that they had then."""
        self._pushed: set[str] = set()
        self._loaded: Path | None = None

    def note(self, ranks: Iterable[int], code: str) -> None:
        """Record that a cell is sent to these ranks."""
        self._newest = {rank: self._cells.setdefault(rank, []) for rank in ranks}
        for cells in self._newest.values():
            cells.append(code)

    def note_pushed(self, names: Iterable[str]) -> None:
        """Record that variables were pushed; their values are not kept."""
        self._pushed.update(names)

    def note_loaded(self, folder: Path) -> None:
        """Record that variables were loaded from a folder; their values are not kept."""
        self._loaded = folder

    def forget_newest(self, ranks: Iterable[int]) -> None:
        """Forget the newest cell of these ranks, because it was interrupted and might never end. The ranks
        have the numbers with which the cell was sent."""
        for rank in ranks:
            if cells := self._newest.get(rank):
                cells.pop()

    def forget(self, rank: int) -> None:
        """Forget the cells of a rank, whose replacement then begins without variables."""
        self._cells[rank] = []

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Forget the cells of all ranks but these. A rank that gets one of the other numbers later is a new
        one, and does not run these cells."""
        self._cells = {rank: self._cells[rank] for rank in ranks if rank in self._cells}

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Move the cells of each rank to its new number, and forget those of ranks that are lost.

        Args:
            numbers: the new numbers of the ranks that stay, by their old numbers.
        """
        self._cells = {numbers[rank]: cells for rank, cells in self._cells.items() if rank in numbers}

    def run_again(self, rank: int, engine: Any) -> list[str]:
        """Run the cells of a rank on its new engine, one after the other; return lines about the outcome for
        the person."""
        # `%debug` waits for input, and changes no variables.
        cells = [code for code in self._cells.get(rank, []) if not code.lstrip().startswith("%debug")]
        lines = [f"its {len(cells)} cells ran again there"]
        for number, code in enumerate(cells, start=1):
            try:
                collect({rank: engine.execute(code, silent=False, block=False)})
            except RankError as error:
                lines.append(f"cell {number} of {len(cells)}: {error}")
        if self._pushed:
            lines.append(f"values that were pushed are missing there: %push {' '.join(sorted(self._pushed))}")
        if self._loaded is not None:
            lines.append(
                f"values that were loaded are missing there: %nbgpu load {shlex.quote(str(self._loaded))}"
            )
        return lines
