"""A run that is read from its folder, whatever process started it and however it ended."""

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
    """A run in a folder, with everything that a report shows.

    Args:
        folder: the run's folder.

    Attributes:
        failures: the failures of the ranks, the earliest first. It is the cause; later ones are those of
            ranks that were freed from a collective because of it.
        error: None, because a folder keeps only the failures of ranks.

    Raises:
        ConfigError: there is no `run.toml` in the folder.
        RunError: the run ended before its ranks had read their data, or a file about the run cannot be read.
            Unreadable single lines of a rank's records are skipped; `reader.damage` says which.
    """

    def __init__(self, folder: Path) -> None:
        """Read the settings, the outcomes of the ranks and their records. Complete metrics.csv if the run is
        over and was cut off."""
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
        """The state of the run by the records of its ranks. It is not a final state if the run goes on, or if
        all ranks were killed."""
        if self.failures:
            return "failed"
        states = {status.state for status in self.statuses()}
        if active := states - FINAL_STATES:
            return state_of_slowest(active)
        return max(states, key=["finished", "stopped", "failed"].index)
