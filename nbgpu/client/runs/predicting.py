"""Apply a run's trained model to new data on the ranks of a state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbgpu.client import presenting
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.runs.serving import give_checkpoint
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import OwnConfig, TrainConfig
from nbgpu.config.prediction import PredictConfig
from nbgpu.config.settings import paths_to_read
from nbgpu.errors import ConfigError, RankError
from nbgpu.machine.files import without_parent_steps
from nbgpu.protocol.calls import Call
from nbgpu.run_folder import checkpoint_files, predictions
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.predictions import Job, Progress, ProgressReader, Row
from nbgpu.text.html import shown_as_html
from nbgpu.text.similar import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

_SHOW_PERIOD_S = 0.25

Show = Callable[[Progress], None]


@dataclass(frozen=True)
class Predictions:
    """What a trained model has made of new data; it prints as a summary."""

    folder: Path
    """The folder with `predictions.csv` and what was written for each sample."""
    rows: Sequence[Row]
    """One for each sample, in the order of the data's names."""
    notes: Sequence[str]
    """Sentences about all samples."""
    left_out: Sequence[str]
    """A line for each file that `skip_bad` left out."""

    @property
    def failed(self) -> dict[str, str]:
        """Why there is no prediction, by the name of the sample."""
        return {row.name: row.failed for row in self.rows if row.failed}

    def frame(self) -> pd.DataFrame:
        """Return the table as a DataFrame, with the samples' names as the index."""
        import pandas as pd

        return pd.DataFrame([dict(row.values) for row in self.rows], index=[row.name for row in self.rows])

    def __str__(self) -> str:
        num_good = len(self.rows) - len(self.failed)
        lines = [f"{num_good} of {len(self.rows)} predicted: {self.folder / predictions.TABLE}", *self.notes]
        lines += [f"left out: {line}" for line in self.left_out]
        lines += [f"no prediction for {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)

    __repr__ = __str__
    _repr_html_ = shown_as_html


def job_of(run_folder: str | Path, asked: PredictConfig, settings: Mapping[str, Any]) -> Job:
    """Return the job that is asked for, with its checkpoint.

    Args:
        run_folder: the folder of a run.
        asked: what to predict.
        settings: settings of the run that are replaced for the prediction.

    Raises:
        ConfigError: lists everything that is wrong, as far as that is known without torch.
    """
    folder = Path(os.fspath(run_folder)).expanduser().absolute()
    _, config = runs.read_settings(folder)
    # What is wrong with the run.
    problems = []
    if not config.PREDICTS:
        problems.append(
            f"{folder.name}: the recipe {config.recipe!r} trains no model that could be applied to new data"
        )
    if isinstance(config, OwnConfig) and not asked.trust:
        problems.append(
            f"trust = False: the model of this run is made by {folder / Path(config.recipe).name}, whose code would run "
            "with all of your permissions. If you trust it, set trust=True (in a terminal --trust)"
        )
    # What is wrong with the settings for the prediction.
    allowed = config.AT_PREDICTION
    problems += [
        f"{name} = {value!r} cannot be changed for a prediction."
        + (
            ""
            if name in type(config).model_fields
            else did_you_mean(name, [*allowed, *PredictConfig.model_fields])
        )
        + (f" What can: {', '.join(allowed)}" if allowed else " With this recipe nothing can")
        for name, value in settings.items()
        if name not in allowed
    ]
    checkpoint = _checkpoint(folder, asked.checkpoint)
    if checkpoint is None:
        problems.append(f"{folder} has no {'intact' if asked.checkpoint == 'newest' else 'best'} checkpoint")
    if not problems:
        try:
            changed = config.counting(**_with_data(config, asked.data), **settings)
            settings = {name: getattr(changed, name) for name in settings}
            problems += [
                f"data = {str(path)!r}: there is no such file or folder"
                for path in paths_to_read(changed, "data")
                if not path.exists()
            ]
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    # The ranks may have another working folder, and get only the settings that differ from the run's.
    data, out = (without_parent_steps(Path(path).expanduser()) for path in (asked.data, asked.out))
    return Job(
        str(folder),
        str(checkpoint),
        str(data.absolute()) if data.exists() else asked.data,
        str(out.absolute()),
        {name: value for name, value in settings.items() if value != getattr(config, name)},
        asked.max_samples,
        asked.skip_bad,
        asked.trust,
    )


def _with_data(config: TrainConfig, data: str) -> dict[str, Any]:
    return {} if isinstance(config, OwnConfig) else {"data": data}


def _checkpoint(folder: Path, which: str) -> Path | None:
    if which == "newest":
        # The ranks look at the contents when they read them.
        return checkpoint_files.newest_whole(folder, contents=False).checkpoint
    try:
        best = checkpoint_files.best(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return None if best is None else best.checkpoint


def predict(state: ClusterState, recovery: Recovery, job: Job, show: Show | None = None) -> Predictions:
    """Predict for all samples of a job on ranks that are ready, and write the table.

    Args:
        state: the state of the cluster that has the ranks.
        recovery: frees its ranks where one fails.
        job: what to predict.
        show: gets the progress, several times a second.

    Raises:
        ConfigError: the output folder cannot be used.
        ClusterError: a host is lost, or files of a folder that it does not see cannot be brought there.
        RankError: a rank failed or died; what is done stays, and the same job goes on with the rest.
    """
    # An earlier try may have done some of the samples.
    job = predictions.begin(job)
    done = [(row.is_reference, row.name) for row in predictions.rows(job) if not row.failed]
    if show is None and presenting.presenter is not None:
        show = presenting.presenter.begin_prediction(f"predictions of {Path(job.run_folder).name}")
    shown = _Shown(ProgressReader(job), show)
    served = state.serve(Path(job.out)).begin(keep=[Path(job.checkpoint).parents[1]])
    give_checkpoint(state, Path(job.checkpoint))
    served.follow()
    results = state.ranks.call(Call.PREDICT, asdict(job), done)
    try:
        recovery.bring_back(RankWatch(state.ranks, results), results, show=shown.update)
    except RankError as error:
        raise RankError(error.failures, len(state.ranks), _can_continue(job)) from None
    finally:
        served.finish_or_stop()
        shown.last()
    # Rank 0 computes the recipe's columns and notes from the rows of all ranks.
    rows = predictions.rows(job)
    served.follow()
    concluded = state.ranks.call(Call.CONCLUDE_PREDICTIONS, asdict(job), list(map(asdict, rows)), ranks=[0])
    try:
        recovery.bring_back(RankWatch(state.ranks, concluded), concluded)
    finally:
        served.finish_or_stop()
    conclusion = concluded[0].result()
    table_rows = [
        replace(row, values={**row.values, **conclusion["columns"].get(row.name, {})})
        for row in sorted(rows, key=lambda row: row.name)
        if not row.is_reference
    ]
    predictions.write_table(Path(job.out), table_rows)
    return Predictions(Path(job.out), table_rows, conclusion["notes"], results[0].result())


def _can_continue(job: Job) -> str:
    return f"The predictions made so far stay in {job.out}, and the same prediction goes on with the missing samples"


class _Shown:
    """Shows the progress several times a second, and not more often."""

    def __init__(self, reader: ProgressReader, show: Show | None) -> None:
        self._reader = reader
        self._show = show
        self._next_mono_s = 0.0

    def update(self) -> None:
        """Show the progress if it is time to."""
        if self._show is not None and time.monotonic() >= self._next_mono_s:
            self._next_mono_s = time.monotonic() + _SHOW_PERIOD_S
            self._show(self._reader.read())

    def last(self) -> None:
        """Show how far it got."""
        if self._show is not None:
            self._show(self._reader.read())
