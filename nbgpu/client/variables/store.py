"""The part of a cluster that copies, saves and loads variables of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nbgpu.client.runs.manager import RunManager
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.release import tell_in_next_cell
from nbgpu.client.variables import saving, transfer
from nbgpu.client.variables.saving import Loaded, Saved
from nbgpu.errors import NbgpuError


class VariableStore:
    """Moves variables between this process, the ranks and files."""

    def __init__(self, state: ClusterState, runs: RunManager) -> None:
        self._state = state
        self._runs = runs

    def pull(self, name: str | Sequence[str], rank: int, ranks: Sequence[int] | Literal["all"] | None) -> Any:
        """Copy variables from ranks, as `Cluster.pull` does.

        Args:
            name: a name, for which the result is the value; or several, for which it is a dict by name.
            rank: the rank, if `ranks` is None.
            ranks: several ranks, for which the result is a dict by rank.
        """
        if ranks is None:
            chosen = self._state.checked_ranks([rank])
        else:
            chosen = self._state.checked_ranks(None if ranks == "all" else ranks)
        self._runs.refuse_during_run()
        names = [name] if isinstance(name, str) else list(name)
        pulled = transfer.pull(self._state.ranks, chosen, names)
        by_rank = {rank: values[name] if isinstance(name, str) else values for rank, values in pulled.items()}
        return by_rank if ranks is not None else by_rank[rank]

    def push(self, ranks: Sequence[int] | None, values: Mapping[str, Any]) -> None:
        """Copy values of the notebook to the ranks. A warning about names that pushed functions lack on the
        ranks becomes news, which the next magic or cell prints."""
        chosen = self._state.checked_ranks(ranks)
        self._runs.refuse_during_run()
        self._state.news += transfer.push(self._state.ranks, chosen, values)
        self._state.history.note_pushed(values)

    def save(self, folder: str | Path, names: Sequence[str] = ()) -> Saved:
        """Write variables of all ranks into a folder, after the group was restored if it was broken."""
        self._runs.make_ready()
        return saving.save(self._state.ranks, self._state.serve(Path(folder), in_parent=True), names)

    def save_before_the_end(self, folder: str | Path, reason: str) -> str:
        """Save all variables because the ranks are about to end, and have the next cell say where they are.

        Returns:
            The sentence that the next cell shows. It includes an error, because no cell is running that could
            raise the error.
        """
        try:
            self.save(folder)
            sentence = f"{reason}: {saving.describe_folder(Path(folder))}"
        except NbgpuError as error:
            sentence = (
                f"{reason}, and the ranks' variables could not be saved in {Path(folder).absolute()}: {error}"
            )
        tell_in_next_cell(sentence[0].upper() + sentence[1:])
        return sentence

    def load(self, folder: str | Path, names: Sequence[str], trust: bool) -> Loaded:
        """Give the ranks the variables of a folder. The folder is noted in the history, because the cells of
        a replaced rank do not restore these variables."""
        self._runs.make_ready()
        loaded = saving.load(self._state.ranks, Path(folder), self._state.serve, names, trust)
        self._state.history.note_loaded(loaded.folder)
        return loaded
