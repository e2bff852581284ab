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
        """Copy a variable, or several as a dict by name, from one rank; with `ranks` from several ranks, as a
        dict by rank."""
        chosen = self._state.checked_ranks([rank] if ranks is None else None if ranks == "all" else ranks)
        self._runs.refuse_during_run()
        names = [name] if isinstance(name, str) else list(name)
        pulled = transfer.pull(self._state.ranks, chosen, names)
        by_rank = {rank: values[name] if isinstance(name, str) else values for rank, values in pulled.items()}
        return by_rank if ranks is not None else by_rank[rank]

    def push(self, ranks: Sequence[int] | None, values: Mapping[str, Any]) -> None:
        """Copy values of the notebook to the ranks. What pushed functions lack on the ranks becomes news,
        which the next magic or cell prints."""
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
        An error becomes part of the sentence that is returned, because no cell is there that could raise
        it."""
        try:
            self.save(folder)
            sentence = f"{reason}: {saving.where_they_are(Path(folder))}"
        except NbgpuError as error:
            sentence = (
                f"{reason}, and the ranks' variables could not be saved in {Path(folder).absolute()}: {error}"
            )
        tell_in_next_cell(sentence[0].upper() + sentence[1:])
        return sentence

    def load(self, folder: str | Path, names: Sequence[str], trust: bool) -> Loaded:
        """Give the ranks the variables of a folder, and note the folder, so that a rank that is replaced can
        be told where its variables are."""
        self._runs.make_ready()
        loaded = saving.load(self._state.ranks, Path(folder), self._state.serve, names, trust)
        self._state.history.note_loaded(loaded.folder)
        return loaded
