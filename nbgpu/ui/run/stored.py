"""A run as its folder tells it, whoever started it and however it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from nbgpu.errors import RunError
from nbgpu.protocol.records import FINAL_STATES, RankFailure, RankStatus, RunState
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import metrics_files
from nbgpu.run_folder.reader import Reader


class StoredRun:
    """Has what a report shows of a run.

    Args:
        folder: the run's.

    Attributes:
        failures: what was raised on the ranks, the first one first; those that it freed come after it.

    Raises:
        ConfigError: there is no `run.toml` in the folder.
        RunError: the run ended before its ranks had looked at their data, or a file that says how it went cannot be read.
            Of a rank's records single lines that cannot be read are passed over; `reader.damage` says which.
    """

    def __init__(self, folder: Path) -> None:
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
        self.status: RunState = self._status()
        if self.status in FINAL_STATES:
            metrics_files.complete(self.folder, max(s.step for s in self.statuses()))

    def statuses(self) -> list[RankStatus]:
        """The last that each rank has said."""
        return self.reader.statuses(self.info.devices)

    def _status(self) -> RunState:
        """As the ranks say. A run that goes on, or was killed with all its ranks, is in none of the final states."""
        if self.failures:
            return "failed"
        states = [status.state for status in self.statuses()]
        going_on = [state for state in states if state not in FINAL_STATES]
        return going_on[0] if going_on else max(states, key=["finished", "stopped", "failed"].index)
