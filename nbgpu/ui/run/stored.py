"""A run as read from its folder, no matter which process started it and how it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from nbgpu.errors import NbgpuError, RunError
from nbgpu.protocol.records import FINAL_STATES, RankFailure, RankStatus, RunState
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import metrics_files
from nbgpu.run_folder.progress import state_of_slowest
from nbgpu.run_folder.reader import Reader


class StoredRun:
    """A run with everything that a report shows.

    Args:
        folder: the run's folder.

    Attributes:
        failures: the failures of the ranks, the original one first, and after it those of ranks that were
            freed.
        error: nothing, because a folder keeps the failures of ranks alone.

    Raises:
        ConfigError: there is no `run.toml` in the folder.
        RunError: the run ended before its ranks had read their data, or a file about the run cannot be read.
            Unreadable single lines of a rank's records are skipped; `reader.damage` says which.
    """

    def __init__(self, folder: Path) -> None:
        """Read the settings, the outcomes of the ranks and the records' statuses from the folder. If the run
        is over and was cut off, complete its metrics.csv."""
        self.folder = folder.absolute()
        _, self.config = runs.read_settings(folder)
        try:
            self.info = runs.read_info(folder)
        except FileNotFoundError:
            raise RunError(
                f"{folder} has no run_info.json: the run ended before its ranks had looked at their data. "
                "rankN.jsonl and rankN.outcome.json say what they met"
            ) from None
        self.reader = Reader(folder, self.info.world_size, live=False)
        outcomes = {rank: runs.outcome(folder, rank) for rank in range(self.info.world_size)}
        # The rank that failed first is the cause; the others failed or were freed because of it.
        failed_s = {event.rank: event.time_s for event in self.reader.events() if event.kind == "failure"}
        self.failures: Sequence[RankFailure] = sorted(
            (outcome for outcome in outcomes.values() if isinstance(outcome, RankFailure)),
            key=lambda failure: failed_s.get(failure.rank, math.inf),
        )
        self.error: NbgpuError | None = None
        self.status: RunState = self._status()
        if self.status in FINAL_STATES:
            metrics_files.complete(self.folder, max(s.step for s in self.statuses()))

    def statuses(self) -> list[RankStatus]:
        """The latest status of each rank."""
        return self.reader.statuses(self.info.devices)

    def _status(self) -> RunState:
        """The state by the ranks' records. A run that goes on, or was killed with all its ranks, is in no
        final state."""
        if self.failures:
            return "failed"
        states = [status.state for status in self.statuses()]
        going_on = set(states) - FINAL_STATES
        return (
            state_of_slowest(going_on)
            if going_on
            else max(states, key=["finished", "stopped", "failed"].index)
        )
