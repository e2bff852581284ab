"""The calls of a cluster that copy, list, save and load variables of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbgpu.client.cluster.cell_calls import CellCalls
from nbgpu.client.cluster.release import tell_in_next_cell
from nbgpu.client.variables import definitions, saving, table, transfer
from nbgpu.client.variables.saving import Loaded, Saved
from nbgpu.errors import NbgpuError

if TYPE_CHECKING:
    import pandas as pd


class VariableCalls(CellCalls):
    """Moves variables between this process, the ranks and files."""

    def pull(
        self, name: str | Sequence[str], rank: int = 0, *, ranks: Sequence[int] | Literal["all"] | None = None
    ) -> Any:
        """Copy a variable of one rank, or the value of an expression there, into this process. Tensors arrive
        on the CPU.

        Args:
            name: the variable's name, or an expression such as 'model.module.state_dict()'. For several names
                the result is a dict by name.
            rank: the rank.
            ranks: several ranks, or 'all', in place of `rank`. The result is then a dict by rank.

        Raises:
            RankError: a rank has no such variable, or its value cannot be sent. The message names every such
                variable.
            TransferError: a value cannot be rebuilt here, because its class is defined on the ranks only.
            RunError: a training run has the ranks now.
        """
        chosen = self._chosen([rank] if ranks is None else None if ranks == "all" else ranks)
        self._refuse_during_run()
        names = [name] if isinstance(name, str) else list(name)
        pulled = transfer.pull(self.ranks, chosen, names)
        by_rank = {rank: values[name] if isinstance(name, str) else values for rank, values in pulled.items()}
        return by_rank if ranks is not None else by_rank[rank]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Give the ranks variables of these names, with copies of the values. Tensors arrive on the CPU.

        Raises:
            TransferError: some values cannot be sent. The message names all of them, and nothing was sent.
            RankError: a rank cannot rebuild a value, because its class is not defined there.
            RunError: a training run has the ranks now.
        """
        chosen = self._chosen(ranks)
        self._refuse_during_run()
        self.news += definitions.push(
            self.ranks, chosen, values, lambda data: transfer.push(self.ranks, chosen, data)
        )
        self.history.note_pushed(values)

    def vars(self, pattern: str = "*") -> pd.DataFrame:
        """A table of the ranks' variables whose names match: one row for each variable and rank.

        The columns are name, rank, type, shape, dtype, device, bytes, content and "ranks differ", which says
        how they differ, and is empty where they agree or where the values were not compared.
        """
        return table.table(self.apply, pattern).frame()

    def save(self, folder: str | Path, names: Sequence[str] = ()) -> Saved:
        """Write the ranks' variables into a folder, all ranks side by side, whole or not at all.

        Tensors, arrays, models, optimizers, DDP objects, frames, containers and plain values are saved as
        JSON and safetensors, functions and classes of cells as source, imports by name, and other objects
        as pickles. The states of the random number generators are there, too. The result prints as lines,
        which name everything that cannot be saved.

        Args:
            folder: a new folder, or one with variables that were saved earlier, which are replaced.
            names: the variables; all of them if none is named.

        Raises:
            ConfigError: the place of the folder cannot be written to.
            DataError: the folder has other files, or cannot be written.
            RankError: a rank has no variable of a name, or cannot write its files. The folder has what it had
                before, as after any other error.
            RunError: a training run has the ranks now, or another process saves into the folder.
        """
        self._make_ready()
        return saving.save(self.ranks, self.serve(Path(folder), in_parent=True), names)

    def save_before_the_end(self, folder: str | Path, why: str) -> str:
        """Save the variables because the ranks will end soon for a reason outside the notebook, and say in
        the next cell where they are.

        Call it on the notebook's main thread, between its cells, as `release_after_s` does. A rank that runs
        a cell saves when that has ended.

        Args:
            folder: as for `save`.
            why: the reason, as the beginning of a sentence: 'the job has 90 s left'.

        Returns:
            The sentence that the next cell shows, for later messages, too. Where the variables could not be
            saved it says why.
        """
        try:
            self.save(folder)
            told = f"{why}: {saving.where_they_are(Path(folder))}"
        except NbgpuError as error:
            told = f"{why}, and the ranks' variables could not be saved in {Path(folder).absolute()}: {error}"
        tell_in_next_cell(told[0].upper() + told[1:])
        return told

    def load(self, folder: str | Path, names: Sequence[str] = (), *, trust: bool = False) -> Loaded:
        """Give the ranks variables that `save` has written: to each its own or, on another number of ranks,
        those that were equal on all of them. The result prints as lines, which name everything that was left
        out.

        Args:
            folder: the folder of the saved variables.
            names: the variables; all of them if none is named.
            trust: whether pickles may be opened and definitions of cells be run, which can do anything.

        Raises:
            DataError: the folder has no saved variables, or none of a name, or is damaged.
            RankError: a rank cannot read its files. No variable was changed.
            RunError: a training run has the ranks now.
        """
        self._make_ready()
        loaded = saving.load(self.ranks, Path(folder), self.serve, names, trust)
        self.history.note_loaded(loaded.folder)
        return loaded
