"""The part of a cluster that plans, trains and predicts."""

from __future__ import annotations

import threading
from pathlib import Path

from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.runs import planning, predicting
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.planning import BatchSizes
from nbgpu.client.runs.predicting import Predictions
from nbgpu.client.runs.run import Run
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import TrainConfig
from nbgpu.errors import RunError
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.calls import Call
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.commands import pass_over_earlier_requests
from nbgpu.run_folder.predictions import Job
from nbgpu.run_folder.settling import SettledConfig
from nbgpu.text.ranks import count_of_ranks


class RunManager:
    """Has the ranks train, estimate what training needs, or apply a trained model.

    Attributes:
        run: the latest training run, which may be over.
    """

    def __init__(self, state: ClusterState, recovery: Recovery) -> None:
        self._state = state
        self._recovery = recovery
        self._planner = planning.Planner(state, recovery)
        self._planned: Plan | None = None
        """The latest plan."""
        self.run: Run | None = None

    @uninterrupted()
    def make_ready(self) -> None:
        """Make sure that all ranks are ready for work, or raise an error that says why they are not."""
        self._state.note_use()
        self._state.ranks.require_reachable()
        self.refuse_during_run()
        self._recovery.make_ready(self.run.folder if self.run is not None else None)

    def refuse_during_run(self) -> None:
        """Raise RunError while the ranks train."""
        if self.run is None or self.run.over:
            return
        if self.run.is_to_stop:
            raise RunError(
                f"{self.run.folder.name} was asked to stop, and is {self.run.status} until then. run.wait() waits for its "
                "end, and then cells run; no variable is lost"
            )
        raise RunError(
            f"the ranks are training ({self.run.folder.name}, {self.run.status}), and code sent to them would "
            "wait until the end. Call run.wait() or run.stop() first"
        )

    def _set_run(self, run: Run) -> None:
        """Make this the latest run, from whose end `release_after_s` counts."""
        self.run = run
        self._state.run_folder = run.folder
        run.on_end(lambda _: self._state.note_use())

    def handle(self, folder: Path) -> Run:
        """Return a handle of a run that another process has started."""
        return Run.rejoin(folder, self._state, self._recovery, self._conclude)

    def rejoin(self, folder: Path) -> Run:
        """Take over a run that another process has started."""
        run = self.handle(folder)
        self._set_run(run)
        return run

    @uninterrupted()
    def train_with(self, config: TrainConfig) -> Run:
        """Start a training run on all ranks and return at once, as `Cluster.train` does, with settings that
        are already checked.

        Raises:
            RankError: a setting is left to the files, and none of them can be used.
            RunError: another run has the ranks now.
        """
        state = self._state
        self.make_ready()
        state.tell_news()
        settled = self._planner.settle(config, check_sha256=True)
        # The latest plan may be of other settings or devices.
        planned = self._planned
        if planned is not None and (planned.config, planned.devices) != (settled.config, state.devices):
            planned = None
        run = Run.start(settled, state, self._recovery, self._conclude, planned)
        self._set_run(run)
        # A process that takes the cluster over finds the run in the cluster's entry of the registry.
        state.write_entry()
        # An interrupt during the start was held back until there was a run to stop.
        try:
            take_interrupt()
        except KeyboardInterrupt:
            run.stop()
            raise
        return run

    def _conclude(self, run: Run, step: int, config: TrainConfig) -> None:
        """Have the ranks work out the result of a run that is over, and make it this cluster's latest run.

        Args:
            run: the handle of the run.
            step: the step of the run's newest checkpoint.
            config: settings with which the run ends at that step.

        Raises:
            RunError: a training run has the ranks now, or they are not as many as the run had.
        """
        state = self._state
        self.make_ready()
        if state.world_size != run.info.world_size:
            raise RunError(
                f"{run.folder.name} had {count_of_ranks(run.info.world_size)}, and the cluster has {state.world_size}. "
                f"%nbgpu resize {run.info.world_size} changes that"
            )
        state.tell_news()
        values, before = config.model_dump(mode="json"), run.config.model_dump(mode="json")
        changes = {name: value for name, value in values.items() if value != before[name]}
        runs.note_change(run.folder, step, changes)
        pass_over_earlier_requests(run.folder)
        run.follow_again(config, state.ranks.call(Call.TRAIN, str(run.folder)))
        self._set_run(run)
        state.write_entry()

    def work_out_result(self, run: Run | str | Path) -> Run:
        """See `Cluster.work_out_result`."""
        if not isinstance(run, Run):
            self.make_ready()
            run = self.handle(Path(run))
        return run.work_out_result()

    def plan_with(self, config: TrainConfig) -> Plan:
        """Plan a run as `Cluster.plan` does, with settings that are already checked."""
        self._planned = self._planner.plan(self.settle(config))
        return self._planned

    def settle(self, config: TrainConfig) -> SettledConfig:
        """Return the settings for these ranks, with values for those that are left to the data.

        Raises:
            ConfigError: the ranks cannot train with these settings.
            RankError: no file can be used.
            RunError: a training run has the ranks now, or every checkpoint is damaged.
        """
        self.make_ready()
        return self._planner.settle(config)

    def find_batch_size_with(self, config: TrainConfig, stop: threading.Event | None = None) -> BatchSizes:
        """Do the work of `Cluster.find_batch_size`, with settings that are already checked."""
        self.make_ready()
        return self._planner.find_batch_size(config, stop)

    @uninterrupted()
    def predict_with(self, job: Job, show: predicting.Show | None = None) -> Predictions:
        """Do the work of `Cluster.predict`, with a job that is already checked; `show` is called with the
        progress."""
        self.make_ready()
        try:
            return predicting.predict(self._state, self._recovery, job, show)
        finally:
            self._state.note_use()
