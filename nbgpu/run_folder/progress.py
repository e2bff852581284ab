"""How far a run has come, for readers that do not follow each of its records."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbgpu.protocol.records import FINAL_STATES, STATES_OF_NO_STEP, Event, RankStatus, RunInfo, RunState
from nbgpu.run_folder import lines
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
    """The progress of the slowest rank of a run, and the remaining time at the present pace."""
    step = min((s.step for s in statuses), default=0)
    rates = [s.values.get("samples_per_s", 0.0) for s in statuses]
    samples_per_s = sum(rate for rate in rates if math.isfinite(rate))
    # A search goes over no samples, and has the time of its steps alone.
    step_s = max((s.values.get("step_s", 0.0) for s in statuses), default=0.0)
    step_s = info.global_batch_size / samples_per_s if samples_per_s > 0 else step_s
    left_s = (info.total_steps - step) * step_s
    # The pace of the steps says nothing about the work after the last one.
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
    if not info.steps_per_epoch:
        return 0
    last = info.epoch_at(max(1, info.total_steps)).epoch
    return last if len(info.epochs_from) <= 1 or last == info.epochs else 0


def state_of_slowest(states: Iterable[RunState]) -> RunState:
    """The state of a run that is not over: that of its ranks, or of the slowest one if they differ."""
    known = set(states)
    return next((state for state in _ORDER if state in known), "training")


class NewestRecords:
    """The state, the step and the newest numbers of one rank of a run, from the end of its file.

    Other than `Reader` it keeps no records and reads no long file from its beginning, so that it costs little
    to look at a run now and then.

    Args:
        folder: the run's folder.
        rank: the rank whose file is read.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = record_path(folder, rank)
        self._rank = rank
        self._offset_bytes: int | None = None
        self._has_state = False
        self.state: RunState = "starting"
        self.step = 0
        self.values: dict[str, float] = {}

    def read(self) -> None:
        """Take in what the rank has written since the last call. Unreadable lines are passed over.

        Raises:
            RunError: there is something else than a file, or it cannot be opened.
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
        if not isinstance(record, Event):
            self.values.update(record.values)
            self.step = max(self.step, record.step)
            if not self._has_state and STEP_SERIES in record.values:
                self.state = "training"  # it was written further back than was looked
        elif record.kind == "state":
            self._has_state = True
            self.state = record.text  # type: ignore[assignment]  # `parse` has checked it
            if record.text not in STATES_OF_NO_STEP:
                # A run whose weights are spread over the ranks may go back to its newest checkpoint.
                self.step = record.step
            else:  # the numbers are of an earlier process
                self.values.clear()


def _last_state(descriptor: int, size_bytes: int) -> bytes:
    """The line with the last change of state in a rank's file; empty where none is found."""
    end_bytes, after = size_bytes, b""
    while end_bytes > max(0, size_bytes - _MOST_BYTES_BACK):
        begin_bytes = max(0, end_bytes - _BLOCK_BYTES)
        block = os.pread(descriptor, end_bytes - begin_bytes, begin_bytes) + after
        found = block.rfind(_STATE)
        line_begin = block.rfind(b"\n", 0, found) + 1
        if found >= 0 and (line_begin or begin_bytes == 0):
            return block[line_begin:].partition(b"\n")[0]
        # The line may lie across the border of two blocks.
        after = block if found >= 0 else block[: max(block.find(b"\n") + 1, len(_STATE))]
        end_bytes = begin_bytes
    return b""
