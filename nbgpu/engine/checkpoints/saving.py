"""The checkpoints of a run as its trainer sees them: rank 0 writes them, and finds the one to resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.checkpoints import sharing
from nbgpu.engine.group import activity, exchange
from nbgpu.engine.group.consensus import together
from nbgpu.errors import RunError
from nbgpu.protocol import served
from nbgpu.run_folder import checkpoint_files, resume
from nbgpu.run_folder.checkpoint_files import Score

StateParts = tuple[dict[str, Tensor], dict[str, Any]]
"""A state's tensors by name, which are sharded with fsdp, and the rest of it as JSON."""


class Saves:
    """The checkpoints of a run. Every rank makes the same calls; only rank 0 uses the disk.

    Args:
        folder: the run's folder.
        keep: how many of the newest intact checkpoints stay; the best one stays besides.
        rank: this rank.
        tell: is called with (kind of event, text, step), also on the writing thread.
    """

    def __init__(self, folder: Path, keep: int, rank: int, tell: Callable[[str, str, int], None]) -> None:
        self.newest_step = 0
        """The step that was saved last, or that the run resumed."""
        self._folder = folder
        self._writer = checkpoint.Writer(folder, keep, tell) if rank == 0 else None

    def begin(self, step: int, state: StateParts, score: Score | None) -> None:
        """Begin a checkpoint; training continues if it fails. A collective if the state is sharded: the ranks
        gather each tensor while rank 0 writes it, and so wait for the disk where the system's file cache is
        full. Otherwise no rank waits for the disk.

        Args:
            step: the number of optimizer steps done.
            state: the state of training.
            score: the score of this step's validation, if it is the best so far.
        """
        self.newest_step = step
        if self._writer is not None:
            self._writer.begin(step, *state, score=score)
        else:
            # Take part in the gathers of rank 0, which needs the shards of all ranks.
            checkpoint.gathering(state[0]).take_rest()

    def finish(self, step: int, state: StateParts, score: Score | None) -> RunError | None:
        """Write a last checkpoint on rank 0 and wait for it. A collective if the state is sharded.

        Returns:
            The error, if the checkpoint could not be written.
        """
        if self._writer is None:
            checkpoint.gathering(state[0]).take_rest()
            return None
        try:
            with activity.during("writing the last checkpoint"):
                self._writer.finish(step, *state, score=score)
        except RunError as error:
            return error
        return None

    def to_begin_with(self) -> tuple[Path | None, tuple[str, ...]]:
        """Return (the checkpoint to resume, None for the first step; notes about it). A collective.

        Only rank 0 searches: other ranks might not see yet a checkpoint that was just written.
        """
        path, notes = exchange.broadcast(together(self._find), source=0)
        return (sharing.everywhere(Path(path)) if path else None), tuple(notes)

    def best(self, step: int, score: Score | None) -> tuple[Path | None, str]:
        """Return the checkpoint with the best validation of the run. A collective.

        Args:
            step: the present step, whose state the ranks have in memory.
            score: the best score of the run so far; None before there is one.

        Returns:
            (the checkpoint, None if the best state is this step's or if no checkpoint can be used; the reason
            why none can be used, or an empty text).
        """
        path, reason = exchange.broadcast(together(lambda: self._find_best(step, score)), source=0)
        return (sharing.everywhere(Path(path)) if path else None), reason

    def point_to_earlier_best(self, path: Path, best: Score | None) -> str | None:
        """Record the best checkpoint of the run that this run resumes as the best one so far; return a note
        if it is gone."""
        if self._writer is None or best is None:
            return None
        return checkpoint.point_to_earlier_best(self._folder, path, best)

    def close(self) -> None:
        """End the writing thread."""
        if self._writer is not None:
            self._writer.close()

    def _find(self) -> tuple[str, Sequence[str]]:
        """Return (the checkpoint to begin with, empty for none; notes about it) on rank 0, and nothing on the
        other ranks."""
        if self._writer is None:
            return "", ()
        self._writer.wait()
        beginning = resume.Beginning.read(self._folder)
        # If this run has written checkpoints before and restarts, these are newer than its beginning.
        if (newest := checkpoint_files.newest_whole(self._folder).checkpoint) is not None:
            return str(served.original(newest)), ()
        return beginning.checkpoint, beginning.notes

    def _find_best(self, step: int, score: Score | None) -> tuple[str, str]:
        """Return (the best checkpoint, empty for none; the reason why there is none) on rank 0, and nothing
        on the other ranks."""
        if self._writer is None or (score is not None and score.step == step):
            return "", ""
        try:
            best = checkpoint_files.best(self._folder)
        except ValueError as error:
            return "", str(error)
        if best is None:
            return "", "no validation gave a number"
        if damage := checkpoint_files.damage(best.checkpoint):
            return "", f"{best.checkpoint} is damaged ({damage})"
        return str(served.original(best.checkpoint)), ""
