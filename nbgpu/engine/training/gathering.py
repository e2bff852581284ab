"""The positions of a run's ranks before they step together, and the choice of the state that they all begin
with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nbgpu.engine.checkpoints.saving import Saves
from nbgpu.engine.group import exchange
from nbgpu.run_folder import checkpoint_files


@dataclass(frozen=True)
class Gathered:
    """The positions of all ranks, known to each of them alike."""

    positions: Sequence[Mapping[str, Any]]
    """What each rank reported of itself, in order of rank."""
    source: int | None
    """The rank that had got furthest; None if no rank has a state."""
    checkpoint: Path | None
    """The checkpoint that the run continues from if no rank has a state; None to begin with the first
    step."""
    notes: Sequence[str]
    """Notes about the checkpoint."""

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done in the state that all ranks begin with."""
        return int(self._state.get("step", 0))

    @property
    def bucket_order(self) -> Sequence[int]:
        """Return the order in which those steps had the parameters in DDP's buckets."""
        # Checkpoints of older versions have none.
        return cast(Sequence[int], self._state.get("bucket_order", ()))

    @property
    def _state(self) -> Mapping[str, Any]:
        if self.source is not None:
            return self.positions[self.source]
        return {} if self.checkpoint is None else checkpoint_files.state(self.checkpoint)


def gather(own: Mapping[str, Any], saves: Saves) -> Gathered:
    """Exchange the positions of all ranks, and settle which state they all begin with. A collective.

    Args:
        own: this rank's position, as JSON: `ready`, whether this rank has the state of its `step`, and other
            information for the other ranks.
        saves: the run's checkpoints.
    """
    positions = exchange.gather(dict(own))
    ready = {rank: position["step"] for rank, position in enumerate(positions) if position["ready"]}
    source = max(ready, key=ready.__getitem__, default=None)
    checkpoint, notes = (None, ()) if source is not None else saves.to_begin_with()
    return Gathered(positions, source, checkpoint, notes)
