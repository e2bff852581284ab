"""The checkpoints of a run as its trainer sees them: rank 0 writes them, and finds the one to go on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.group import activity, exchange
from nbgpu.engine.group.consensus import together
from nbgpu.errors import RunError
from nbgpu.run_folder import checkpoint_files, resume
from nbgpu.run_folder.checkpoint_files import Score

WholeState = tuple[dict[str, Tensor], dict[str, Any]]
"""A state's tensors by name, and the rest of it as JSON."""


class Saves:
    """Every rank has one and calls the same of it; only rank 0's does something with the disk.

    Args:
        folder: the run's folder.
        keep: how many of the newest whole checkpoints stay; the best one stays besides.
        rank: whose this is.
        tell: is called with (kind of event, text, step), also on the writing thread.
    """

    def __init__(self, folder: Path, keep: int, rank: int, tell: Callable[[str, str, int], None]) -> None:
        self.newest_step = 0
        """What was saved last, or what the run went on from."""
        self._folder = folder
        self._writer = checkpoint.Writer(folder, keep, tell) if rank == 0 else None

    def begin(self, step: int, whole_state: WholeState, score: Score | None) -> None:
        """Begins a checkpoint. No rank waits for it, and training goes on if it fails.

        Args:
            step: optimizer steps done.
            whole_state: what training goes on from.
            score: of this step's validation, if it is the best so far.
        """
        self.newest_step = step
        if self._writer is not None:
            self._writer.begin(step, *whole_state, score=score)

    def finish(self, step: int, whole_state: WholeState, score: Score | None) -> RunError | None:
        """Writes a last checkpoint and waits for it, on rank 0; returns why it could not be written."""
        if self._writer is None:
            return None
        try:
            with activity.during("writing the last checkpoint"):
                self._writer.finish(step, *whole_state, score=score)
        except RunError as error:
            return error
        return None

    def to_begin_with(self) -> tuple[Path | None, tuple[str, ...]]:
        """(The checkpoint that the run goes on from, None for the first step; what to say of it). A collective.

        Found by one rank: what is still being written would be there for some of them, and not for others.
        """
        found, notes = exchange.broadcast(together(self._find), source=0)
        return (Path(found) if found else None), tuple(notes)

    def best(self, step: int, score: Score | None) -> tuple[Path | None, str]:
        """(The checkpoint with the best validation, None where that is this step's; why it cannot be used). A collective."""
        found, why = exchange.broadcast(together(lambda: self._find_best(step, score)), source=0)
        return (Path(found) if found else None), why

    def point_to_earlier_best(self, path: Path, best: Score | None) -> str | None:
        """Has the run's best checkpoint be that of the run whose checkpoint it goes on from; says so if it is gone."""
        if self._writer is None or best is None:
            return None
        return checkpoint.point_to_earlier_best(self._folder, path, best)

    def close(self) -> None:
        """Ends the thread that writes."""
        if self._writer is not None:
            self._writer.close()

    def _find(self) -> tuple[str, Sequence[str]]:
        if self._writer is None:
            return "", ()
        self._writer.wait()
        beginning = resume.Beginning.read(self._folder)
        # Its own is newer, where the run begins again because no rank has the whole state any more.
        if (own := checkpoint_files.newest_whole(self._folder).checkpoint) is not None:
            return str(own), ()
        return beginning.checkpoint, beginning.notes

    def _find_best(self, step: int, score: Score | None) -> tuple[str, str]:
        if self._writer is None or (score is not None and score.step == step):
            return "", ""
        try:
            best = checkpoint_files.best(self._folder)
        except ValueError as error:
            return "", str(error)
        if best is None:
            return "", "no validation gave a number"
        damage = checkpoint_files.damage(best.checkpoint)
        return ("", f"{best.checkpoint} is damaged ({damage})") if damage else (str(best.checkpoint), "")
