"""The calls of a cluster that plan, train and predict."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal

from nbgpu.client.cluster.parts import ClusterParts
from nbgpu.client.cluster.recipe_calls import RecipeCalls
from nbgpu.client.runs import planning, predicting
from nbgpu.client.runs.batch_sizes import BatchSizes
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.predicting import Predictions
from nbgpu.client.runs.run import Run
from nbgpu.config import TrainConfig
from nbgpu.config.prediction import PredictConfig
from nbgpu.errors import RunError
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.planning.suitability import settled
from nbgpu.protocol.calls import Call
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.predictions import Job
from nbgpu.text.ranks import count_of_ranks


class RunCalls(ClusterParts, RecipeCalls):
    """Has the ranks train, estimate what training needs, or apply a trained model."""

    @uninterrupted()
    def train_with(self, config: TrainConfig) -> Run:
        """As `train`, with settings that are already checked."""
        settled(config, self.devices)
        self.note_use()
        self._make_ready()
        self.tell_news()
        chosen = self._choices.of(self, config)
        config = settled(config.changed(**chosen.values), self.devices)
        planned = self._planned if self._planned and self._planned.config == config else None
        self.run = Run.start(config, self, planned, chosen)
        self._note()
        self.run.on_end(lambda _: self.note_use())
        try:
            take_interrupt()
        except KeyboardInterrupt:
            self.run.stop()
            raise
        return self.run

    def conclude(self, run: Run, step: int, config: TrainConfig) -> None:
        """Have the ranks work out the result of a run that is over; the run is this cluster's from now on.

        Args:
            run: its handle, which asks for this.
            step: the step of its newest checkpoint.
            config: settings with which the run ends at that step.

        Raises:
            RunError: a training run has the ranks now, or they are not as many as the run had.
        """
        self._make_ready()
        if self.world_size != run.info.world_size:
            raise RunError(
                f"{run.folder.name} had {count_of_ranks(run.info.world_size)}, and the cluster has {self.world_size}. "
                f"%nbgpu resize {run.info.world_size} changes that"
            )
        self.tell_news()
        values, before = config.model_dump(mode="json"), run.config.model_dump(mode="json")
        changes = {name: value for name, value in values.items() if value != before[name]}
        runs.note_change(run.folder, step, changes)
        run.follow_again(config, self.ranks.call(Call.TRAIN, str(run.folder), "", 0.0, True))
        self.run = run
        self._note()
        run.on_end(lambda _: self.note_use())

    def work_out_result(self, run: Run | str | Path) -> Run:
        """Work out the result of a run that ended without one, as `run.work_out_result` does, also of a run
        of an earlier cluster.

        Args:
            run: a run, or its folder.

        Raises:
            RunError: as for `run.work_out_result`.
        """
        if not isinstance(run, Run):
            self._make_ready()
            run = Run.rejoin(Path(run), self)
        return run.work_out_result()

    def plan_with(self, config: TrainConfig) -> Plan:
        """As `plan`, with settings that are already checked."""
        settled(config, self.devices)
        self._make_ready()
        chosen = self._choices.of(self, config)
        self._planned = planning.plan(self, settled(config.changed(**chosen.values), self.devices), chosen)
        return self._planned

    def with_choices(self, config: TrainConfig) -> TrainConfig:
        """Return the settings for these ranks, with values for those that are left to the data.

        Raises:
            ConfigError: the ranks cannot train with these settings.
            RankError: no file can be used.
            RunError: a training run has the ranks now.
        """
        settled(config, self.devices)
        self._make_ready()
        return settled(config.changed(**self._choices.of(self, config).values), self.devices)

    def find_batch_size_with(self, config: TrainConfig, stop: threading.Event | None = None) -> BatchSizes:
        """As `find_batch_size`, with settings that are already checked."""
        config = planning.for_search(config)
        settled(config, self.devices)
        self._make_ready()
        chosen = self._choices.of(self, config)
        found = planning.find_batch_size(self, settled(config.changed(**chosen.values), self.devices), stop)
        # The batch is the largest for this model, and the run with it must not choose another one.
        self._choices.note(self, config.changed(batch_size=found.batch_size), chosen)
        return found

    @uninterrupted()
    def predict(
        self,
        run: Run | str | Path,
        data: str | Path,
        out: str | Path = "predictions",
        *,
        checkpoint: Literal["newest", "best"] = "newest",
        max_samples: int | None = None,
        skip_bad: bool = False,
        trust: bool = False,
        **settings: Any,
    ) -> Predictions:
        """Apply a run's trained model to new data, with a share of the samples on each rank, and write a
        table and the recipe's files for each sample.

        A file that turns out to be bad fails alone. A prediction that is cut off goes on with what is missing
        when it is called again.

        Args:
            run: a run, or its folder, which may have come from another machine.
            data: the new data, in the form that the recipe trains on.
            out: the folder for the predictions.
            checkpoint: the run's newest checkpoint, or the one with the best validation.
            max_samples: the number of samples, the first ones of the data; None for all.
            skip_bad: leave out files with bad names or headers, in place of refusing to begin.
            trust: run the recipe file in the run's folder, for a recipe of your own.
            settings: settings of the run that may differ for a prediction, such as `spacing` of a diffusion.

        Raises:
            ConfigError: something is wrong with the arguments or with `out`; nothing was predicted.
            RankError: files are bad, or a rank failed or died.
            RunError: a training run has the ranks now.
        """
        asked = PredictConfig.checked(
            data=str(data),
            out=str(out),
            checkpoint=checkpoint,
            max_samples=max_samples,
            skip_bad=skip_bad,
            trust=trust,
        )
        return self.predict_with(
            predicting.job_of(run.folder if isinstance(run, Run) else run, asked, settings)
        )

    @uninterrupted()
    def predict_with(self, job: Job, show: predicting.Show | None = None) -> Predictions:
        """As `predict`, with a job that is already checked; `show` gets the progress."""
        self._make_ready()
        self.note_use()
        try:
            return predicting.predict(self, job, show)
        finally:
            self.note_use()
