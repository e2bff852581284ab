"""The progress of a run, read from the end of its files: for JupyterLab's sidebar and status bar, and for
`nbgpu ps`, which need not read every record."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbgpu.errors import RunError
from nbgpu.protocol.records import FINAL_STATES, STATES_OF_NO_STEP, Event, RankStatus, RunInfo, RunState
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import lines, names
from nbgpu.run_folder.metrics_table import STEP_SERIES
from nbgpu.run_folder.rank_files import Record, parse, record_path

_BLOCK_BYTES = 2**18
_MOST_BYTES_BACK = 2**26
"""The part of a file, at its end, that is searched for a change of state. A rank writes about 300 bytes for
each step, so that this is some 200,000 steps."""

_STATE = b'"kind": "state"'

_ORDER: tuple[RunState, ...] = (
    "starting",
    "loading packages",
    "loading",
    "paused",
    "validating",
    "working out the result",
    "training",
    "waiting for rank 0",
    "stopping",
)
"""The states of a rank before its end, those that the other ranks wait for first."""


@dataclass(frozen=True)
class ProgressBar:
    """The progress of a run."""

    step: int
    total_steps: int
    """The run's length in steps; 0 if it is given in epochs and the data have not been read yet."""
    epoch: int
    """The number of the epoch, counted from 1; 0 until the data have been read."""
    num_epochs: int
    """The run's length in epochs; 0 until the data have been read. It is also 0 if the length is given in
    steps and the batch size was changed during the run, because epochs then have different lengths."""
    samples_per_s: float
    """The throughput over all ranks; 0 until it is measured, and for a recipe without samples."""
    eta_s: float | None
    """The remaining time in seconds; None if it is not known."""

    @property
    def in_steps(self) -> str:
        """'step 5 of 60'."""
        return f"step {self.step} of {self.total_steps}" if self.total_steps else f"step {self.step}"


def progress(info: RunInfo, state: str, statuses: Sequence[RankStatus]) -> ProgressBar:
    """Return the progress of the slowest rank of a run, and the remaining time at the present throughput.

    Args:
        info: the run.
        state: the state of the run.
        statuses: the newest state and values of each rank.
    """
    step = min((s.step for s in statuses), default=0)
    rates = [s.values.get("samples_per_s", 0.0) for s in statuses]
    samples_per_s = sum(rate for rate in rates if math.isfinite(rate))
    # A recipe without samples, which searches for a field, has only the times of its steps.
    step_s = max((s.values.get("step_s", 0.0) for s in statuses), default=0.0)
    step_s = info.global_batch_size / samples_per_s if samples_per_s > 0 else step_s
    left_s = (info.total_steps - step) * step_s
    # After the last step the result is computed, and how long that takes does not follow from the steps.
    has_eta = 0 < left_s < math.inf and state not in FINAL_STATES and state != "paused"
    return ProgressBar(
        step=step,
        total_steps=info.total_steps,
        epoch=info.epoch_at(max(1, min(step + 1, info.total_steps))).epoch if info.steps_per_epoch else 0,
        num_epochs=_num_epochs(info),
        samples_per_s=samples_per_s,
        eta_s=left_s if has_eta else None,
    )


def _num_epochs(info: RunInfo) -> int:
    """Return the number of the run's last epoch; 0 until the data have been read, or if the epochs have
    different numbers of steps and the run's length is given in steps (`ProgressBar.num_epochs`)."""
    if not info.steps_per_epoch:
        return 0
    last = info.epoch_at(max(1, info.total_steps)).epoch
    are_alike = len(info.epochs_from) <= 1
    is_given_in_epochs = last == info.epochs  # which is 0 for a length in steps
    return last if are_alike or is_given_in_epochs else 0


def state_of_slowest(states: Iterable[RunState]) -> RunState:
    """Return the state of a run that is not over: if the states of its ranks differ, the state that comes
    first in _ORDER."""
    present = set(states)
    return next((state for state in _ORDER if state in present), "training")


class NewestRecords:
    """The state, the step and the newest values of one rank of a run, from the end of its file.

    Unlike `Reader`, this class keeps no records, and reads only the end of a long file, so that it is cheap.

    Args:
        folder: the run's folder.
        rank: the rank whose file is read.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Begin with no values, in the state 'starting'."""
        self._path = record_path(folder, rank)
        self._rank = rank
        self._offset_bytes: int | None = None
        self._has_state = False
        self.state: RunState = "starting"
        self.step = 0
        self.values: dict[str, float] = {}

    def read(self) -> None:
        """Read the records that the rank has written since the last call. Unreadable lines are skipped.

        Raises:
            RunError: the path is not a regular file, or cannot be opened.
        """
        last_state: list[bytes] = []
        try:
            with lines.open_file(self._path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if self._offset_bytes is None or size_bytes < self._offset_bytes:
                    # The newest values are near the end of the file, and the last state may be far before.
                    last_state = [_last_state(file.fileno(), size_bytes)]
                    self._offset_bytes = max(0, size_bytes - _BLOCK_BYTES)
            new, self._offset_bytes = lines.read_new_lines(self._path, self._offset_bytes)
        except FileNotFoundError:  # the rank has not begun to write
            return
        for line in [*last_state, *new]:
            with suppress(ValueError):  # the Reader reports damaged lines
                self._take(parse(self._rank, line))

    def _take(self, record: Record) -> None:
        """Update state, step and values from one record."""
        if not isinstance(record, Event):
            self.values.update(record.values)
            self.step = max(self.step, record.step)
            if not self._has_state and STEP_SERIES in record.values:
                self.state = "training"  # `_last_state` does not search so far back
        elif record.kind == "state":
            self._has_state = True
            self.state = record.text  # type: ignore[assignment]  # `parse` has checked it
            if record.text not in STATES_OF_NO_STEP:
                # A run with sharded weights (FSDP) that loses a rank goes back to its newest checkpoint.
                self.step = record.step
            else:  # another process has taken the rank's place
                self.values.clear()


def _last_state(descriptor: int, size_bytes: int) -> bytes:
    """Return the last complete line with a change of state in a rank's file; empty if there is none in the
    last _MOST_BYTES_BACK bytes. The file is searched in blocks from its end.

    Args:
        descriptor: the open file.
        size_bytes: the size of the file.
    """
    end_bytes, carried = size_bytes, b""
    while end_bytes > max(0, size_bytes - _MOST_BYTES_BACK):
        begin_bytes = max(0, end_bytes - _BLOCK_BYTES)
        block = os.pread(descriptor, end_bytes - begin_bytes, begin_bytes) + carried
        # A line without its end was cut off by a full disk, or is being written.
        state_begin = block.rfind(_STATE, 0, block.rfind(b"\n") + 1)
        line_begin = block.rfind(b"\n", 0, state_begin) + 1
        if state_begin >= 0 and (line_begin or begin_bytes == 0):
            return block[line_begin:].partition(b"\n")[0]
        # The line with the state, or a part of `_STATE`, may lie across the border to the block before. The
        # part of it in this block is searched again together with that block.
        carried = block if state_begin >= 0 else block[: max(block.find(b"\n") + 1, len(_STATE))]
        end_bytes = begin_bytes
    return b""


class RunView:
    """The state and the progress of one run, as of the last `read`.

    Args:
        folder: the run's folder.
        num_ranks: the number of ranks, which counts until the run has written its `run_info.json`.

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
        """The path of the run's report, which is written after the run's end."""
        return self.folder / names.REPORT

    def read(self) -> None:
        """Read what was written since the last call.

        Raises:
            RunError: a file of the run cannot be read.
        """
        self._read_info()
        if self._info is not None and self._info.world_size != len(self._ranks):
            # A run continues with fewer ranks when a host is lost, and with more when one comes back.
            self._ranks = [NewestRecords(self.folder, rank) for rank in range(self._info.world_size)]
        for rank in self._ranks:
            rank.read()
        self.state = self._state()

    def in_words(self) -> str:
        """Return the run's name, state and step as one line."""
        if self._info is None:
            return f"{self.folder.name}, {self.state}"
        return f"{self.folder.name}, {self.state}, {self._progress(self._info).in_steps}"

    def describe(self) -> dict[str, Any]:
        """Return the run as JSON. `progress` is None until the ranks have read their data."""
        return {
            "name": self.folder.name,
            "title": self._info.title if self._info is not None else "",
            "state": self.state,
            "is_over": self.is_over,
            "has_report": self.report.is_file(),
            "progress": None if self._info is None else asdict(self._progress(self._info)),
        }

    def states(self) -> Mapping[int, str]:
        """Return the state and step of each rank, by rank: 'step 12', 'validating, step 12'."""
        return {rank: _in_words(records) for rank, records in enumerate(self._ranks)}

    def _progress(self, info: RunInfo) -> ProgressBar:
        statuses = [
            RankStatus(rank, records.state, records.step, device, 0.0, records.values)
            for rank, (records, device) in enumerate(zip(self._ranks, info.devices, strict=False))
        ]
        return progress(info, self.state, statuses)

    def _state(self) -> RunState:
        """Return the state in which the run ended, or else the state of its slowest rank."""
        end = runs.end_state(self.folder, len(self._ranks))
        return end or state_of_slowest({rank.state for rank in self._ranks} - FINAL_STATES)

    def _read_info(self) -> None:
        """Read `run_info.json` again if it was written since the last time."""
        try:
            written_ns = (self.folder / names.INFO).stat().st_mtime_ns
        except FileNotFoundError:
            return  # the ranks have not looked at their data yet
        if written_ns != self._info_written_ns:
            self._info = runs.read_info(self.folder)
            self._info_written_ns = written_ns


def _in_words(records: NewestRecords) -> str:
    """Return the state and step of a rank as text; the step alone while the rank trains."""
    if not records.step:
        return records.state
    step = f"step {records.step}"
    return step if records.state == "training" else f"{records.state}, {step}"


def opened(folder: Path, num_ranks: int) -> RunView | None:
    """Open a view of a run; None if its folder is gone or is not this user's own."""
    try:
        return RunView(folder, num_ranks)
    except (OSError, RunError):
        return None
