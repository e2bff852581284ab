"""The protocol of recipes that choose settings by the files that they are to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Proposal:
    """Values for the settings that are left to the data."""

    values: Mapping[str, Any]
    why: str
    """What the values follow from, in a few words."""


@runtime_checkable
class Proposing(Protocol):
    """A recipe whose settings `FROM_DATA` may be left out."""

    def proposals(self, on_gpu: bool) -> Sequence[Proposal]:
        """Return values for the settings that are left out, at least once, what takes the most memory first.

        Only names and headers of files are read. The values are the same on every rank.

        Args:
            on_gpu: whether the ranks have GPUs; steps on the CPU have to be small ones to end in time.

        Raises:
            DataError: no file can be used.
        """
        ...
