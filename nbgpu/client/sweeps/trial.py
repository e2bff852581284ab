"""One trial of a sweep: its settings, the folders of its runs, and its progress."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbgpu.client.runs.metrics_frame import frame_of
from nbgpu.client.runs.run import Run
from nbgpu.config import TrainConfig
from nbgpu.errors import NbgpuError, RankError, RunError
from nbgpu.planning import trials
from nbgpu.protocol.records import Event, RankFailure, RunState, Sample
from nbgpu.run_folder import checkpoint_files, names, resume
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.reader import START, Reader

if TYPE_CHECKING:
    import pandas as pd

TrialState = Literal["waiting"] | RunState

CURVE_POINTS = 2048
"""A curve with this many points loses half of them, but never the best one."""

LOSS = "loss"


@dataclass
class Curve:
    """One number of a trial by optimizer step: the mean over the ranks that record it."""

    goal: Literal["min", "max"] = "min"
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Append a point. A full curve loses every second point, but not the best one."""
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) >= CURVE_POINTS:
            best = self._best_index()
            self._keep([i for i in range(len(self.values)) if i % 2 or i == best])

    def cut_after(self, step: int) -> None:
        """Drop the points after a step, because a run repeats the later steps."""
        self._keep([i for i, recorded_step in enumerate(self.steps) if recorded_step <= step])

    def _keep(self, indices: Sequence[int]) -> None:
        self.steps, self.values = [self.steps[i] for i in indices], [self.values[i] for i in indices]

    def best(self) -> tuple[int, float] | None:
        """(step, value) of the best point; None before there is a finite one."""
        index = self._best_index()
        return None if index is None else (self.steps[index], self.values[index])

    def _best_index(self) -> int | None:
        finite = [i for i, value in enumerate(self.values) if math.isfinite(value)]
        sign = 1 if self.goal == "min" else -1
        return min(finite, key=lambda i: sign * self.values[i], default=None)


class Trial:
    """The state of one trial of a sweep.

    Attributes:
        number: the number of the trial in the sweep, counted from 0.
        settings: the settings in which the trial differs from others, by field.
        config: all settings of the trial.
        folder: the folder with the trial's run, and with another run for each time that the trial was
            resumed.
        error: the error that ended the trial; None if it did not fail.
    """

    def __init__(
        self,
        number: int,
        settings: Mapping[str, Any],
        config: TrainConfig,
        sweep_folder: Path,
        sort_by: str,
        goal: Literal["min", "max"],
    ) -> None:
        """Make a trial that waits. `read_earlier_runs` adds what its earlier runs have recorded."""
        self.number = number
        self.settings = settings
        self.folder = sweep_folder / f"trial-{number:03d}"
        self.config = config.changed(runs_dir=str(self.folder))
        self.error: NbgpuError | None = None
        self.seconds = 0.0
        """The training time of all runs: from the start of each to its newest record."""
        self._num_ranks = 1
        self._sort_by = sort_by
        self._curves = {LOSS: Curve(), sort_by: Curve(goal)}
        self._incomplete: dict[tuple[str, int], dict[int, float]] = {}
        """By (name, step): the values, by rank, if not all ranks have recorded theirs yet."""
        self._newest_steps: dict[tuple[str, int], int] = {}
        """By (name, rank): the newest recorded step."""
        self._step = 0
        self._state: TrialState = "waiting"
        self._run: Run | None = None
        self._cursor = START
        self._started_s = 0.0
        self._seconds_before = 0.0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Trial {self.number}: {self.label}, {self.state}, step {self.step}>"

    @property
    def label(self) -> str:
        """The settings in which the trial differs from others, as text."""
        return trials.label(self.settings)

    @property
    def state(self) -> TrialState:
        """The state of the trial's run; 'waiting' while the trial has no run and is not over."""
        run = self._run
        return self._state if run is None else run.status

    @property
    def over(self) -> bool:
        """Whether the sweep has nothing left to do for this trial."""
        return self._run is None and self._state in ("finished", "failed", "stopped")

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        self._refresh()
        return self._step

    @property
    def loss(self) -> float | None:
        """The newest training loss, averaged over the ranks; None before the first."""
        values = self.curve(LOSS).values
        return values[-1] if values else None

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, value) of the best value by which the sweep is sorted; None before the first."""
        return self.curve(self._sort_by).best()

    def curve(self, name: str) -> Curve:
        """Return a copy of a curve over the steps of all runs: that of 'loss', or of the number by which the
        sweep is sorted."""
        self._refresh()
        with self._lock:
            curve = self._curves[name]
            return Curve(curve.goal, list(curve.steps), list(curve.values))

    @property
    def total_steps(self) -> int:
        """The total number of steps; 0 where the length is given in epochs and the data have not been read
        yet."""
        run = self._run
        return run.info.total_steps if run is not None else self.config.total_steps(0)

    @property
    def run_folders(self) -> list[Path]:
        """The folders of the trial's runs, the oldest first."""
        written = self.folder.glob(f"*/{names.SETTINGS}")
        return [path.parent for path in sorted(written, key=lambda path: path.stat().st_mtime_ns)]

    def metrics(self) -> pd.DataFrame:
        """Return a data frame of all numbers that the ranks recorded in the trial's runs, by rank and step.
        Steps that were repeated appear once."""
        # pandas is imported here, because that takes a third of a second, which would slow every import of
        # this module.
        import pandas as pd

        frame = pd.DataFrame(columns=["rank", "step", "time_s"])
        for folder in self.run_folders:
            # This run has repeated the steps after the checkpoint from which it resumed.
            kept = frame[frame["step"] <= resume.Beginning.read(folder).step]
            pieces = [piece for piece in (kept, frame_of(_open_reader(folder))) if not piece.empty]
            frame = pd.concat(pieces, ignore_index=True) if pieces else kept
        return frame

    def checkpoint(self) -> Path:
        """The newest intact checkpoint of the trial; RunError if there is none."""
        for folder in reversed(self.run_folders):
            newest = checkpoint_files.newest_whole(folder).checkpoint
            if newest is not None:
                return newest
        raise RunError(f"trial {self.number} ({self.label}) has no intact checkpoint yet")

    # The sweep calls the methods below.

    def read_earlier_runs(self) -> None:
        """Read what the trial's earlier runs have recorded, and whether the trial is finished. A trial whose
        last run failed or was stopped waits again: the sweep trains it once more."""
        folders = self.run_folders
        for folder in folders:
            self._begin_records(folder, runs.world_size(folder, otherwise=1))
            self._add_records(_open_reader(folder).records())
        outcomes = [runs.outcome(folders[-1], rank) for rank in range(self._num_ranks)] if folders else []
        # A run that was killed after its last checkpoint has nothing left to do either.
        if (outcomes and set(map(str, outcomes)) == {"finished"}) or self._has_last_checkpoint():
            self._state = "finished"

    def next_config(self) -> TrainConfig:
        """The settings of the trial's next run, which resumes from the trial's newest checkpoint, if there is
        one."""
        if any(checkpoint_files.checkpoints(folder) for folder in self.run_folders):
            return self.config.changed(resume=resume.AUTO)
        return self.config

    def begin_run(self, run: Run) -> None:
        """Read the records of a run of this trial from now on."""
        with self._lock:
            self.error = None
            self._begin_records(run.folder, run.info.world_size)
            self._cursor = START
            self._run = run

    def end_run(self, state: TrialState, error: NbgpuError | None = None) -> None:
        """Take over the state of the trial's run, which is over or could not be started."""
        self._refresh()
        with self._lock:
            # A run keeps every record in memory, and a sweep may have hundreds of runs.
            self._run = None
            self._state = state
            self.error = error

    def failures(self) -> tuple[RankFailure, ...]:
        """The failures of the ranks, with their tracebacks."""
        return self.error.failures if isinstance(self.error, RankError) else ()

    def stop_run(self) -> None:
        """Ask the trial's run, if there is one, to end after its current step."""
        run = self._run
        # A run that is over by now raises RunError.
        with suppress(RunError):
            if run is not None:
                run.stop()

    def _has_last_checkpoint(self) -> bool:
        last = checkpoint_files.checkpoint_name(self.config.steps)
        paths = [path for folder in self.run_folders for path in checkpoint_files.checkpoints(folder)]
        return self.config.epochs is None and any(path.name == last for path in paths)

    def _begin_records(self, folder: Path, num_ranks: int) -> None:
        """Prepare for the records of a run, which repeats the steps after the checkpoint from which it
        resumes."""
        self._num_ranks = num_ranks
        step = resume.Beginning.read(folder).step
        for curve in self._curves.values():
            curve.cut_after(step)
        self._step = step
        self._incomplete, self._newest_steps = {}, {}
        self._seconds_before = self.seconds
        self._started_s = (folder / names.SETTINGS).stat().st_mtime

    def _refresh(self) -> None:
        """Read the new records of the present run."""
        with self._lock:
            if self._run is not None:
                for records, cursor in self._run.reader.batches(self._cursor):
                    self._cursor = cursor
                    # The number of ranks changes when a host is lost or comes back. The earlier ranks will
                    # not complete the steps that only some of them have recorded.
                    if self._num_ranks != self._run.info.world_size:
                        self._num_ranks = self._run.info.world_size
                        self._incomplete = {}
                    self._add_records(records)

    def _add_records(self, records: Iterable[Sample | Event]) -> None:
        """Update the newest step, the time and the curves. A curve gets a point, the mean over the ranks,
        once all ranks have recorded their values."""
        for record in records:
            self._step = max(self._step, record.step)
            self.seconds = max(self.seconds, self._seconds_before + record.time_s - self._started_s)
            if not isinstance(record, Sample):
                continue
            for name in self._curves.keys() & record.values.keys():
                if record.step <= self._newest_steps.get((name, record.rank), -1):
                    self._go_back(name, record.rank, record.step)
                self._newest_steps[name, record.rank] = record.step
                values = self._incomplete.setdefault((name, record.step), {})
                values[record.rank] = record.values[name]
                # Validation values are already combined over the ranks, and only rank 0 records them.
                if len(values) == self._num_ranks or name.startswith("val_"):
                    del self._incomplete[name, record.step]
                    self._curves[name].add(record.step, sum(values.values()) / len(values))

    def _go_back(self, name: str, rank: int, step: int) -> None:
        """Drop the points, and the values of one rank, from a step on, because a run that has lost a rank
        repeats these steps."""
        self._curves[name].cut_after(step - 1)
        for (other_name, other_step), values in self._incomplete.items():
            if other_name == name and other_step >= step:
                values.pop(rank, None)


def _open_reader(run_folder: Path) -> Reader:
    # A run that was cut off early has not recorded its number of ranks.
    return Reader(run_folder, runs.world_size(run_folder, otherwise=1), live=False)
