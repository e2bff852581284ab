"""The cells with which a rank that takes another's place can get its variables back."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbgpu.client.engines.results import collect
from nbgpu.errors import RankError


class CellHistory:
    """The code that was sent to each rank, so that a rank that takes its place can run it again."""

    def __init__(self) -> None:
        self._cells: dict[int, list[str]] = {}
        self._newest: dict[int, list[str]] = {}
        """The cells of the ranks that were sent the newest one, by their numbers at that time."""
        self._pushed: set[str] = set()
        self._loaded: Path | None = None

    def note(self, ranks: Iterable[int], code: str) -> None:
        """Note that these ranks are sent a cell."""
        self._newest = {rank: self._cells.setdefault(rank, []) for rank in ranks}
        for cells in self._newest.values():
            cells.append(code)

    def note_pushed(self, names: Iterable[str]) -> None:
        """Note that variables were sent; their values are not kept."""
        self._pushed.update(names)

    def note_loaded(self, folder: Path) -> None:
        """Note that variables were loaded from a folder; their values are not kept."""
        self._loaded = folder

    def forget_newest(self, ranks: Iterable[int]) -> None:
        """Remove the newest cell from those that these ranks, by their numbers when it was sent, would run
        again: it was cut off, and might never end."""
        for rank in ranks:
            if cells := self._newest.get(rank):
                cells.pop()

    def forget(self, rank: int) -> None:
        """Forget the rank's cells: the rank is to begin empty."""
        self._cells[rank] = []

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Forget the cells of all ranks but these: a rank that comes later with such a number is another
        one."""
        self._cells = {rank: self._cells[rank] for rank in ranks if rank in self._cells}

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give each rank's cells its new number; a rank without one is lost, and its cells with it.

        Args:
            numbers: the new numbers of the ranks, by those from before.
        """
        self._cells = {numbers[rank]: cells for rank, cells in self._cells.items() if rank in numbers}

    def run_again(self, rank: int, engine: Any) -> list[str]:
        """Run the rank's cells on its new engine, one after the other; return what happened, in lines."""
        # `%debug` waits for a person, and changes nothing.
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
