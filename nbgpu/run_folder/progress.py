"""The progress of a run, for readers that do not follow each of its records: JupyterLab's sidebar and status
bar, and `nbgpu ps`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
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
"""How far back a state is looked for. A rank writes about 300 bytes for each step, so these are some 200,000
steps."""

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
"""The states of a rank, the one that the others wait for first."""


@dataclass(frozen=True)
class ProgressBar:
    """The progress of a run. `eta_s` is None where it is not known. Epochs are 0 until the data have been
    read, and so are the steps of a run whose length is given in epochs."""

    step: int
    total_steps: int
    epoch: int
    num_epochs: int
    """The run's length in epochs. It is 0, too, where the length was given in steps and a change of the batch
    size has changed how many of them an epoch has: then it is no fixed number."""
    samples_per_s: float
    """The throughput over all ranks; 0 until it is known, and of a search, which goes over no samples."""
    eta_s: float | None

    @property
    def in_steps(self) -> str:
        """'step 5 of 60'."""
        return f"step {self.step} of {self.total_steps}" if self.total_steps else f"step {self.step}"


def progress(info: RunInfo, state: str, statuses: Sequence[RankStatus]) -> ProgressBar:
    """Return the progress of the slowest rank of a run, and the remaining time at the present pace.

    Args:
        info: the run.
        state: the state of the run.
        statuses: the newest state and values of each rank.
    """
    step = min((s.step for s in statuses), default=0)
    rates = [s.values.get("samples_per_s", 0.0) for s in statuses]
    samples_per_s = sum(rate for rate in rates if math.isfinite(rate))
    # A search for a field has no samples, only times of steps.
    step_s = max((s.values.get("step_s", 0.0) for s in statuses), default=0.0)
    step_s = info.global_batch_size / samples_per_s if samples_per_s > 0 else step_s
    left_s = (info.total_steps - step) * step_s
    # After the last step the result is computed, and the pace of the steps does not say how long that takes.
    moves = 0 < left_s < math.inf and state not in FINAL_STATES and state != "paused"
    return ProgressBar(
        step=step,
        total_steps=info.total_steps,
        epoch=info.epoch_at(max(1, min(step + 1, info.total_steps))).epoch if info.steps_per_epoch else 0,
        num_epochs=_num_epochs(info),
        samples_per_s=samples_per_s,
        eta_s=left_s if moves else None,
    )


def _num_epochs(info: RunInfo) -> int:
    """Return the run's length in epochs; 0 if it is not known, or no fixed number because epochs have had
    different lengths."""
    if not info.steps_per_epoch:
        return 0
    last = info.epoch_at(max(1, info.total_steps)).epoch
    return last if len(info.epochs_from) <= 1 or last == info.epochs else 0


def state_of_slowest(states: Iterable[RunState]) -> RunState:
    """Return the state of a run that is not over: the state of its ranks, or of the rank that the others wait
    for if they differ."""
    known = set(states)
    return next((state for state in _ORDER if state in known), "training")


class NewestRecords:
    """The state, the step and the newest values of one rank of a run, from the end of its file.

    Unlike `Reader` this class keeps no records and reads no long file from its beginning, so that a look at a
    run costs little.

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
        try:
            file = lines.open_file(self._path)
        except FileNotFoundError:  # the rank has not begun to write
            return
        with file:
            size_bytes = os.fstat(file.fileno()).st_size
            begin_bytes = self._offset_bytes
            if begin_bytes is None or size_bytes < begin_bytes:
                # The newest numbers stand near the end, and the state may be far before them.
                new = [_last_state(file.fileno(), size_bytes)]
                begin_bytes = max(0, size_bytes - _BLOCK_BYTES)
            else:
                new = []
            file.seek(begin_bytes)
            whole = lines.whole(file.read(size_bytes - begin_bytes))
        self._offset_bytes = begin_bytes + sum(map(len, whole)) + len(whole)
        new += whole
        for line in new:
            try:
                self._take(parse(self._rank, line))
            except ValueError:
                continue  # those who follow the run are told of damaged lines

    def _take(self, record: Record) -> None:
        """Update state, step and values from one record."""
        if not isinstance(record, Event):
            self.values.update(record.values)
            self.step = max(self.step, record.step)
            if not self._has_state and STEP_SERIES in record.values:
                self.state = "training"  # the state was recorded too far back in the file to be searched for
        elif record.kind == "state":
            self._has_state = True
            self.state = record.text  # type: ignore[assignment]  # `parse` has checked it
            if record.text not in STATES_OF_NO_STEP:
                # A run whose weights are spread over the ranks may go back to its newest checkpoint.
                self.step = record.step
            else:  # the numbers are of an earlier process
                self.values.clear()


def _last_state(descriptor: int, size_bytes: int) -> bytes:
    """Return the last whole line with a change of state in a rank's file, searching block by block from the
    end; empty if none is found."""
    end_bytes, carried = size_bytes, b""
    while end_bytes > max(0, size_bytes - _MOST_BYTES_BACK):
        begin_bytes = max(0, end_bytes - _BLOCK_BYTES)
        block = os.pread(descriptor, end_bytes - begin_bytes, begin_bytes) + carried
        # A line without its end was cut off by a full disk, or is being written.
        found = block.rfind(_STATE, 0, block.rfind(b"\n") + 1)
        line_begin = block.rfind(b"\n", 0, found) + 1
        if found >= 0 and (line_begin or begin_bytes == 0):
            return block[line_begin:].partition(b"\n")[0]
        # What may belong to a line that begins in the block before: all of this block, or the rest of that
        # line, and so much at least that a mark across the border of the blocks is found.
        carried = block if found >= 0 else block[: max(block.find(b"\n") + 1, len(_STATE))]
        end_bytes = begin_bytes
    return b""


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
        """Return the run's name, its state and its step, in a line."""
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
        """Return the state of the run: that in which its ranks ended, or that of the slowest rank."""
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
