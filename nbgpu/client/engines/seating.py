"""Which engine sits where: what must be known of a cluster's ranks beside their devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbgpu.client.engines.results import collect
from nbgpu.machine.signals import uninterrupted


@dataclass
class Seating:
    """The engines behind the ranks; changes when one is replaced, and is kept for whoever takes the cluster over."""

    engines: dict[int, int] = field(default_factory=dict)
    """ipyparallel's number of each rank's engine."""
    pids: dict[int, int] = field(default_factory=dict)
    """By rank."""
    spares: dict[int, int] = field(default_factory=dict)
    """ipyparallel's numbers of engines that wait to take a rank's place, by pid."""
    generation: int = 0
    """Which forming of the group was begun last."""
    is_whole: bool = True
    """Whether all ranks came to that group, and it has not been given up since."""

    @classmethod
    @uninterrupted()
    def at_start(cls, client: Any, world_size: int, timeout_s: float, check: Callable[[], None]) -> Seating:
        """The first engines, in the order of their numbers, are the ranks; the others are spares.

        Raises:
            ClusterError: an engine does not answer in time; or `check`, which is called meanwhile, raises it.
        """
        numbers = sorted(client.ids)
        # All asked before one is waited for: this is part of every start.
        asked = {number: client[number].apply_async(os.getpid) for number in numbers}
        pids = collect(asked, timeout_s, check)
        ranks = dict(enumerate(numbers[:world_size]))
        return cls(
            engines=ranks,
            pids={rank: pids[number] for rank, number in ranks.items()},
            spares={pids[number]: number for number in numbers[world_size:]},
        )
