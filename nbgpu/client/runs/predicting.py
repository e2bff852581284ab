"""Apply a run's trained model to new data on the ranks of a cluster."""

from __future__ import annotations

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
    """The predictions of a trained model for new data; it prints as a summary."""

    folder: Path
    """The folder with `predictions.csv` and the files of each sample."""
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
        """Return the table: one row for each sample, with the samples' names as the index."""
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


def job_of(run_folder: str | Path, request: PredictConfig, settings: Mapping[str, Any]) -> Job:
    """Check a request for a prediction, and return it as a job with its checkpoint.

    Args:
        run_folder: the folder of a run.
        request: what to predict.
        settings: settings of the run that are replaced for the prediction.

    Raises:
        ConfigError: lists every problem that can be seen without torch.
    """
    folder = Path(run_folder).expanduser().absolute()
    _, config = runs.read_settings(folder)
    # Check the run.
    problems = []
    if not config.PREDICTS:
        problems.append(
            f"{folder.name}: the recipe {config.recipe!r} trains no model that could be applied to new data"
        )
    if isinstance(config, OwnConfig) and not request.trust:
        problems.append(
            f"trust = False: the model of this run is made by {folder / Path(config.recipe).name}, whose code would run "
            "with all of your permissions. If you trust it, set trust=True (in a terminal --trust)"
        )
    # Check the settings for the prediction.
    problems += filter(None, (_setting_problem(name, value, config) for name, value in settings.items()))
    checkpoint = _checkpoint(folder, request.checkpoint)
    if checkpoint is None:
        problems.append(
            f"{folder} has no {'intact' if request.checkpoint == 'newest' else 'best'} checkpoint"
        )
    if not problems:
        # With a recipe of one's own the setting `data` is unused, because its code decides what is read.
        data_setting = {} if isinstance(config, OwnConfig) else {"data": request.data}
        try:
            changed = config.counting(**data_setting, **settings)
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
    # The ranks may have another working folder, so the paths become absolute.
    data, out = (without_parent_steps(Path(path).expanduser()) for path in (request.data, request.out))
    return Job(
        str(folder),
        str(checkpoint),
        str(data.absolute()) if data.exists() else request.data,
        str(out.absolute()),
        {name: value for name, value in settings.items() if value != getattr(config, name)},
        request.max_samples,
        request.skip_bad,
        request.trust,
    )


def _setting_problem(name: str, value: Any, config: TrainConfig) -> str:
    """Return why a setting cannot be changed for a prediction; empty if it can."""
    allowed = config.AT_PREDICTION
    if name in allowed:
        return ""
    is_typo = name not in type(config).model_fields
    meant = did_you_mean(name, [*allowed, *PredictConfig.model_fields]) if is_typo else ""
    what_can = f" What can: {', '.join(allowed)}" if allowed else " With this recipe nothing can"
    return f"{name} = {value!r} cannot be changed for a prediction.{meant}{what_can}"


def _checkpoint(folder: Path, which: str) -> Path | None:
    """Return the folder of the newest or the best checkpoint of a run; None if there is none."""
    if which == "newest":
        # The ranks check the contents when they read them.
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
        recovery: frees the other ranks if one fails.
        job: what to predict.
        show: is called with the progress several times a second; None shows a progress bar.

    Raises:
        ConfigError: the output folder cannot be used.
        ClusterError: a host is lost, or files cannot be copied to a host that does not see their folder.
        RankError: a rank failed or died. Finished samples stay, and the same job goes on with the others.
    """
    # An earlier attempt may have done some of the samples.
    job = predictions.begin(job)
    done = [(row.is_reference, row.name) for row in predictions.rows(job) if not row.failed]
    if show is None and presenting.presenter is not None:
        show = presenting.presenter.begin_prediction(f"predictions of {Path(job.run_folder).name}")
    progress = _ThrottledProgress(ProgressReader(job), show)
    served = state.serve(Path(job.out)).begin(keep=[Path(job.checkpoint).parents[1]])
    give_checkpoint(state, Path(job.checkpoint))
    served.follow()
    results = state.ranks.call(Call.PREDICT, asdict(job), done)
    try:
        recovery.bring_back(RankWatch(state.ranks, results), results, show=progress.update)
    except RankError as error:
        advice = f"The predictions made so far stay in {job.out}, and the same prediction goes on with the missing samples"
        raise RankError(error.failures, len(state.ranks), advice) from None
    finally:
        served.finish_or_stop()
        progress.update(is_last=True)
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


class _ThrottledProgress:
    """Shows the progress every `_SHOW_PERIOD_S`, however often it is updated."""

    def __init__(self, reader: ProgressReader, show: Show | None) -> None:
        self._reader = reader
        self._show = show
        self._next_mono_s = 0.0

    def update(self, is_last: bool = False) -> None:
        """Show the progress if the period is over or this is the last update."""
        if self._show is not None and (is_last or time.monotonic() >= self._next_mono_s):
            self._next_mono_s = time.monotonic() + _SHOW_PERIOD_S
            self._show(self._reader.read())
