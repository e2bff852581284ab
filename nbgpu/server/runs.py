"""How far a cluster's newest run has come, from the files in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbgpu.errors import RunError
from nbgpu.protocol.records import FINAL_STATES, RankStatus, RunInfo, RunState
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import names
from nbgpu.run_folder.progress import NewestRecords, progress, state_of_slowest


class RunView:
    """One run, read again each time that somebody looks.

    Args:
        folder: the run's folder.
        num_ranks: how many ranks write there until the run says so itself.

    Raises:
        RunError: the folder is not this user's own.
        FileNotFoundError: the folder is gone.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        runs.require_own(folder)
        self.folder = folder
        self._ranks = [NewestRecords(folder, rank) for rank in range(num_ranks)]
        self._info: RunInfo | None = None
        self._info_written_ns = 0
        self.state: RunState = "starting"

    @property
    def is_over(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def report(self) -> Path:
        """The file with the run's report, which is there some time after the end."""
        return self.folder / names.REPORT

    def read(self) -> None:
        """Take in what was written since the last call.

        Raises:
            RunError: a file of the run cannot be read.
        """
        self._read_info()
        if self._info is not None and self._info.world_size != len(self._ranks):
            # It goes on with fewer ranks without a host, and with more when one comes back.
            self._ranks = [NewestRecords(self.folder, rank) for rank in range(self._info.world_size)]
        for rank in self._ranks:
            rank.read()
        self.state = self._state()

    def describe(self) -> dict[str, Any]:
        """The run as JSON. `progress` is None until the ranks have looked at their data."""
        return {
            "name": self.folder.name,
            "title": self._info.title if self._info is not None else "",
            "state": self.state,
            "is_over": self.is_over,
            "has_report": self.report.is_file(),
            "progress": None if self._info is None else self._progress(self._info),
        }

    def states(self) -> Mapping[int, str]:
        """What each rank does in the run, by rank: 'step 12', 'validating, step 12'."""
        return {rank: _in_words(records) for rank, records in enumerate(self._ranks)}

    def _progress(self, info: RunInfo) -> dict[str, Any]:
        statuses = [
            RankStatus(rank, records.state, records.step, device, 0.0, records.values)
            for rank, (records, device) in enumerate(zip(self._ranks, info.devices, strict=False))
        ]
        return asdict(progress(info, self.state, statuses))

    def _state(self) -> RunState:
        """The state of the run: how its ranks say that they ended, or what the slowest one does."""
        end = runs.end_state(self.folder, len(self._ranks))
        return end or state_of_slowest({rank.state for rank in self._ranks} - FINAL_STATES)

    def _read_info(self) -> None:
        try:
            written_ns = (self.folder / names.INFO).stat().st_mtime_ns
        except FileNotFoundError:
            return  # the ranks have not looked at their data yet
        if written_ns != self._info_written_ns:
            self._info = runs.read_info(self.folder)
            self._info_written_ns = written_ns


def _in_words(records: NewestRecords) -> str:
    if not records.step:
        return records.state
    step = f"step {records.step}"
    return step if records.state == "training" else f"{records.state}, {step}"


def opened(folder: Path, num_ranks: int) -> RunView | None:
    """A view of a run; None where its folder is gone or is not this user's own."""
    try:
        return RunView(folder, num_ranks)
    except (OSError, RunError):
        return None
