"""Which engine is which rank, and which generation of the process group they have formed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbgpu.client.engines.results import collect
from nbgpu.machine.processes import EngineProcess
from nbgpu.machine.signals import uninterrupted
from nbgpu.text.ranks import ranks_by


@dataclass
class RankAssignment:
    """The engines and processes of the ranks and spares. It changes when an engine is replaced, and is stored
    in the registry for the next owner of the cluster."""

    engines: dict[int, int] = field(default_factory=dict)
    """ipyparallel's number of each rank's engine."""
    processes: dict[int, EngineProcess] = field(default_factory=dict)
    """The process of each rank."""
    spares: dict[int, EngineProcess] = field(default_factory=dict)
    """The processes of the spares, by ipyparallel's number."""
    leaving: list[EngineProcess] = field(default_factory=list)
    """The processes of ranks that are about to leave the group."""
    generation: int = 0
    """The number of the newest generation of the process group, which may not be complete yet."""
    is_whole: bool = True
    """Whether all ranks have joined that generation, and it was not given up since."""

    @classmethod
    @uninterrupted()
    def at_start(
        cls, client: Any, host: str, world_size: int, timeout_s: float, check: Callable[[], None]
    ) -> RankAssignment:
        """Return the assignment at a cluster's start: the engines with the lowest numbers are the ranks, the
        others are spares.

        Args:
            client: ipyparallel's client, with which all engines are registered.
            host: the name of the host on which they run.
            world_size: the number of ranks.
            timeout_s: the time that the engines have to answer, in seconds.
            check: a function that is called meanwhile, and raises if there is nothing to wait for any more.

        Raises:
            ClusterError: an engine does not answer in time, or `check` raised it.
        """
        numbers = sorted(client.ids)
        # Ask all engines before waiting for one, because this is part of every start.
        replies = {number: client[number].apply_async(os.getpid) for number in numbers}
        pids = collect(replies, timeout_s, check)
        processes = {number: EngineProcess(host, pid) for number, pid in pids.items()}
        ranks = dict(enumerate(numbers[:world_size]))
        return cls(
            engines=ranks,
            processes={rank: processes[number] for rank, number in ranks.items()},
            spares={number: processes[number] for number in numbers[world_size:]},
        )

    def ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks on each host, by its name."""
        # A copy: another thread may replace ranks meanwhile.
        return ranks_by((process.host, rank) for rank, process in sorted(dict(self.processes).items()))

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each rank on its own host."""
        return {rank: process.pid for rank, process in self.processes.items()}
