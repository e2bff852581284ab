"""Where the ranks of a run stand before they do steps together, and whose state they all begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbgpu.engine.checkpoints.saving import Saves
from nbgpu.engine.group import exchange
from nbgpu.run_folder import checkpoint_files


@dataclass(frozen=True)
class Gathered:
    """What all ranks know of one another, the same on each of them."""

    positions: Sequence[Mapping[str, Any]]
    """What each rank said of itself, in order of rank."""
    source: int | None
    """The rank that had got furthest; None where none has a state."""
    checkpoint: Path | None
    """What the run goes on from where no rank has a state; None for the first step."""
    notes: Sequence[str]
    """What to say of the checkpoint."""

    @property
    def step(self) -> int:
        """The optimizer steps that were done in the state that all begin with."""
        if self.source is not None:
            return int(self.positions[self.source]["step"])
        return 0 if self.checkpoint is None else int(checkpoint_files.state(self.checkpoint)["step"])


def gather(own: Mapping[str, Any], saves: Saves) -> Gathered:
    """Tells the other ranks where this one stands, and settles whose state all begin with. A collective.

    Args:
        own: JSON; `ready`, whether this rank has the state of its `step`, and what else others are to know.
        saves: the run's checkpoints.
    """
    positions = exchange.gather(dict(own))
    ready = {rank: position["step"] for rank, position in enumerate(positions) if position["ready"]}
    source = max(ready, key=ready.__getitem__, default=None)
    checkpoint, notes = (None, ()) if source is not None else saves.to_begin_with()
    return Gathered(positions, source, checkpoint, notes)
