"""What each rank of a cluster does, asked from outside of the cluster's kernel."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nbgpu.client.engines.stacks import StackSample, StackSampler
from nbgpu.client.faults.hangs import RankActivity, notice
from nbgpu.host.stacks import Stacks
from nbgpu.machine.processes import EngineProcess
from nbgpu.protocol.records import MainThreadState

_PATIENCE_S = 0.3
_SILENCE_WORTH_SAYING_S = 1.0


class RanksWatch:
    """Asks the ranks of one cluster where they are, each time that somebody looks.

    The ranks answer on sockets in the cluster's folder, as they do to their own notebook, which is not asked.
    What is not known here is whether a rank without work has finished a cell that others are still in: such a
    rank is idle.

    Args:
        folder: the cluster's folder.
        pids: the process ids of the ranks.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self._seen: dict[int, StackSample] = {}
        processes = {rank: EngineProcess("", pid) for rank, pid in pids.items()}
        self._sampler = StackSampler(processes, lambda _: Stacks(folder), self._seen)
        self._here_since: dict[int, tuple[MainThreadState, float]] = {}

    def look(self) -> dict[int, RankActivity]:
        """What each rank is doing, by rank. This takes at most a third of a second."""
        # Where the folder is gone, so are the ranks.
        self._sampler.ask()
        self._sampler.collect(_PATIENCE_S)
        for rank, seen in self._seen.items():
            # The line's text is the person's code, which nobody needs here.
            where = replace(seen.where, source="")
            if rank not in self._here_since or self._here_since[rank][0] != where:
                self._here_since[rank] = where, seen.mono_s
        return {rank: self._place(rank) for rank in self.pids}

    def _place(self, rank: int) -> RankActivity:
        if self._sampler.silent_s(rank) > _SILENCE_WORTH_SAYING_S:
            return RankActivity(
                instead=self._sampler.silence(rank), stands_still=self._sampler.stands_still(rank)
            )
        if rank not in self._here_since:
            return RankActivity()
        where, since_mono_s = self._here_since[rank]
        return RankActivity(where, time.monotonic() - since_mono_s)

    def close(self) -> None:
        """Close the connections of open questions."""
        self._sampler.close()


def who_waits(places: Mapping[int, RankActivity], notice_after_s: float) -> str:
    """Which ranks wait where and which do not, in a sentence; empty while none waits for as long as the
    cluster's setting says."""
    return notice(places, notice_after_s) if notice_after_s else ""
