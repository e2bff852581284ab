"""A record of the pieces of memory that are taken and given back, which says what was held at the peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PARAMETERS = "parameters"
GRADIENTS = "gradients"
BUCKETS = "buckets"
GATHERED = "gathered"
OPTIMIZER = "optimizer"
AVERAGE = "average"
DISCRIMINATOR = "discriminator"
BATCHES = "batches"
ACTIVATIONS = "activations"
SCRATCH = "scratch"
CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    BUCKETS,
    GATHERED,
    OPTIMIZER,
    AVERAGE,
    DISCRIMINATOR,
    BATCHES,
    ACTIVATIONS,
    SCRATCH,
)
"""What the tensors of a training step are for. `buckets`: those of DDP, if they are not the gradients
themselves; `gathered`: the weights that FSDP has gathered, and the gradients that it is about to scatter;
`batches`: the inputs, also those that wait; `scratch`: what a kernel frees before it ends; `activations`: all
others."""


@dataclass(eq=False)
class Piece:
    """A piece of memory, from when it is taken until it is given back."""

    num_bytes: int
    begin: int
    """The number of changes before it was taken."""
    end: int | None = None
    """The number of changes before it was given back; None if it never was."""
    category: str = ACTIVATIONS
    is_claimed: bool = False

    def lives_after(self, num_changes: int) -> bool:
        """Return whether it is held after so many changes."""
        return self.begin < num_changes and (self.end is None or self.end >= num_changes)


class Tape:
    """The changes of the memory that tensors hold, in order."""

    def __init__(self) -> None:
        self._living: dict[int, Piece] = {}
        self._pieces: list[Piece] = []
        self._num_changes = 0
        self._now_bytes = 0
        self._scratch_bytes = 0
        self.peak_bytes = 0
        self.peak_after = 0
        """The number of changes after which the peak was reached."""

    def holds(self, key: int) -> bool:
        """Return whether the piece of this key is held now."""
        return key in self._living

    def take(self, key: int, num_bytes: int, category: str = ACTIVATIONS) -> Piece:
        """Note that a piece was taken; `key` names it until it is given back."""
        # The end of a piece may have been missed, such as that of one that another thread freed.
        self.give_back(key)
        piece = Piece(num_bytes, self._num_changes, category=category)
        self._living[key] = piece
        self._pieces.append(piece)
        self._num_changes += 1
        self._now_bytes += num_bytes
        self._rise(0)
        return piece

    def give_back(self, key: int) -> None:
        """Note that a piece was given back; keys that are not known are left out."""
        piece = self._living.pop(key, None)
        if piece is not None:
            piece.end = self._num_changes
            self._num_changes += 1
            self._now_bytes -= piece.num_bytes

    def for_a_moment(self, num_bytes: int) -> None:
        """Note the scratch memory of a kernel, which has been given back already."""
        self._rise(num_bytes)

    def claim(self, category: str, keys: Iterable[int]) -> None:
        """Say what the pieces of these keys, as far as they are held now, are for. The first claim counts."""
        for key in keys:
            piece = self._living.get(key)
            if piece is not None and not piece.is_claimed:
                piece.category, piece.is_claimed = category, True

    def claim_others(self, category: str) -> None:
        """Say what all pieces are for that are held now and that nothing has claimed."""
        self.claim(category, list(self._living))

    def pieces_at_peak(self) -> list[Piece]:
        """Return the pieces that were held at the peak."""
        return [piece for piece in self._pieces if piece.lives_after(self.peak_after)]

    def parts_at_peak(self) -> dict[str, int]:
        """Return the bytes of each category at the peak; they add up to `peak_bytes`."""
        parts = dict.fromkeys(CATEGORIES, 0)
        for piece in self.pieces_at_peak():
            parts[piece.category] += piece.num_bytes
        parts[SCRATCH] += self._scratch_bytes
        return parts

    def _rise(self, scratch_bytes: int) -> None:
        if self._now_bytes + scratch_bytes > self.peak_bytes:
            self.peak_bytes = self._now_bytes + scratch_bytes
            self.peak_after = self._num_changes
            self._scratch_bytes = scratch_bytes
