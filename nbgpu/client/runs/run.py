"""The handle of a training run: it shows the run's state and takes a person's requests."""

from __future__ import annotations

import errno
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbgpu.client import presenting
from nbgpu.client.engines.other_hosts.served import Served
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import LeftResult
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.ipykernel.notice import Notice, Progress, ProgressLine
from nbgpu.client.runs import explaining, serving
from nbgpu.client.runs.ending import Completion
from nbgpu.client.runs.metrics_frame import frame_of, parts_frame
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.watch import RunWatch
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import TrainConfig
from nbgpu.config.settings import steerable
from nbgpu.errors import ConfigError, NbgpuError, RankError, RunError
from nbgpu.exports import export
from nbgpu.exports.export import Exported
from nbgpu.machine.signals import uninterrupted
from nbgpu.performance.bottlenecks import Explanation
from nbgpu.performance.links import Links
from nbgpu.performance.timeline import Timeline, of_run
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import (
    FINAL_STATES,
    Command,
    RankFailure,
    RankStatus,
    RunInfo,
    RunState,
)
from nbgpu.run_folder import checkpoint_files, metrics_files, names, resume
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.commands import send_command, send_settings
from nbgpu.run_folder.progress import progress as how_far
from nbgpu.run_folder.progress import state_of_slowest
from nbgpu.run_folder.reader import Reader
from nbgpu.run_folder.settling import SettledConfig
from nbgpu.text.ranks import count_of_ranks
from nbgpu.text.similar import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("nbgpu.run")
_STOP_PATIENCE_S = 10.0
_REJOIN_PATIENCE_S = 120.0
"""How long the ranks may take to close a run that had ended before this process took it over."""

Conclude = Callable[["Run", int, TrainConfig], None]
"""Has the ranks work out the result of a run that is over. It is called with the run, the step of its newest
checkpoint, and settings with which the run ends at that step."""


class Run:
    """A training run on the ranks of a cluster.

    Attributes:
        folder: the run's folder: run.toml, rankN.jsonl, checkpoints/, report.html, env.json.
        config: the settings that the run was started with, and those that were set since.
        reader: every sample and event of every rank so far.
    """

    @uninterrupted()
    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        info: RunInfo,
        state: ClusterState,
        recovery: Recovery,
        conclude: Conclude,
        results: Mapping[int, Reply],
        planned: Plan | None = None,
        served: Served | None = None,
    ) -> None:
        """Begin to follow a run whose ranks have been called (`start`, `rejoin`).

        Args:
            folder: the run's folder.
            config: the settings.
            info: the run's devices, batch and length, until rank 0 has written them into the folder.
            state: the state of the cluster.
            recovery: repairs the ranks after a failure.
            conclude: has the ranks work out the result of a run that is over.
            results: the pending replies to the call that trains, by rank.
            planned: the plan that was made for this run; None to make it from the settings.
            served: the folder's copies on hosts that do not share it; None if there are none.
        """
        self.folder = folder
        self.config = config
        self._planned = planned or Plan.at_first(state.config, config, info.devices, state.chosen_transport)
        self._info = info
        self._info_written_ns = 0
        """The modification time of the file from which `info` was read last; 0 before the first time."""
        self._state = state
        self._recovery = recovery
        self._conclude = conclude
        self._concludes = False
        """Whether the run had ended, and the ranks now work out its result."""
        self._served = served or Served(folder, [])
        self._preparing: threading.Thread | None = None
        """Imports what the report needs while the run goes on."""
        if presenting.presenter is not None:
            self._preparing = threading.Thread(
                target=presenting.presenter.prepare_report, name="nbgpu-prepare", daemon=True
            )
            self._preparing.start()
        self._follow(results)

    def _follow(self, results: Mapping[int, Reply]) -> None:
        """Begin to follow the ranks, on a thread, until the run ends.

        Args:
            results: the pending replies to the call that trains, by rank.
        """
        self.reader = Reader(self.folder, self._info.world_size)
        self._ending: Completion[RunState] = Completion(self.folder.name, _log)
        self._watch = RunWatch(
            self.folder,
            self.config,
            self._state,
            self._recovery,
            results,
            self.statuses,
            self._follow_on_ranks,
            self._served.is_needed,
        )
        self._live = serving.follow(self._served, self.config, self.reader, self._state)
        self._num_heals_reported = 0
        threading.Thread(target=self._follow_to_the_end, name="nbgpu-run", daemon=True).start()

    def __repr__(self) -> str:
        now = how_far(self.info, self.status, self.statuses())
        return f"<Run {self.folder.name}: {self.status}, {now.in_steps}>"

    @classmethod
    def start(
        cls,
        settled: SettledConfig,
        state: ClusterState,
        recovery: Recovery,
        conclude: Conclude,
        planned: Plan | None = None,
    ) -> Run:
        """Make the run's folder and start the trainer on every rank; `planned` is the plan that was made for
        this run, if any."""
        folder = runs.create(settled, state.config)
        served = serving.begin(folder, state)
        results = state.ranks.call(Call.TRAIN, str(folder))
        return cls(
            folder,
            settled.config,
            _first_info(folder, settled.config, state),
            state,
            recovery,
            conclude,
            results,
            planned,
            served,
        )

    @classmethod
    def rejoin(cls, folder: Path, state: ClusterState, recovery: Recovery, conclude: Conclude) -> Run:
        """Return the handle of a run that another process started. How each rank ended is read from the run's
        folder, because the ranks reply to the process that called them."""
        runs.require_own(folder)
        _, config = runs.read_settings(folder)
        config = runs.with_changes(config, folder)
        # The cluster may have been resized since the run ended.
        num_ranks = min(len(state.devices), runs.world_size(folder, len(state.devices)))
        results = {rank: LeftResult(folder, rank) for rank in range(num_ranks)}
        _leave_missing_outcomes(folder, results, state)
        run = cls(folder, config, _first_info(folder, config, state), state, recovery, conclude, results)
        if all(result.ready() for result in results.values()):
            # The run has ended. Closing it on ranks that have just started may take long, because they import
            # packages first.
            run._ending.wait_at_most(_REJOIN_PATIENCE_S)
        return run

    @property
    def info(self) -> RunInfo:
        """The run's devices, batch and length, read again when rank 0 has changed the file. What depends on
        the data, such as the steps of an epoch, is 0 or empty until the ranks have read the data."""
        path = self.folder / names.INFO
        try:
            written_ns = path.stat().st_mtime_ns
        except FileNotFoundError:
            return self._info
        if written_ns != self._info_written_ns:
            self._info_written_ns = written_ns
            self._info = runs.read_info(self.folder)
        return self._info

    @property
    def plan(self) -> Plan:
        """The plan of the run, as `cluster.plan` returns it. Once the ranks have read the data, it has their
        description of the data."""
        info = self.info
        if not info.data:
            return self._planned
        return replace(self._planned, data=info.data, steps_per_epoch=info.steps_per_epoch)

    @property
    def failures(self) -> Sequence[RankFailure]:
        """The failures that were raised on the ranks; empty unless `status` is 'failed'."""
        return self._watch.failures

    @property
    def error(self) -> NbgpuError | None:
        """The reason why the run failed, as `wait` raises it; None while the run goes on, and if it ended
        well."""
        return RankError(self.failures) if self.failures else self._watch.lost

    @property
    def hang(self) -> str:
        """A sentence about why the run makes no progress; empty while it does.

        While a rank waits longer than the cluster's `notice_after_s`, it says which ranks wait where and
        which do not. Once the ranks have ended, it says which files are still being copied from other hosts.
        """
        return self._watch.hang or self._served.in_words()

    @property
    def outlives_kernel(self) -> bool:
        """Whether the run goes on when the notebook's kernel ends, because its cluster was started with
        `keep`."""
        return self._state.config.keep

    @property
    def lost_ranks(self) -> list[int]:
        """The ranks whose host is lost, until the run goes on without that host or the host is back."""
        lost = [] if self.over else self._state.pool.lost()
        return self._recovery.hosts.ranks_on(lost) if lost else []

    @property
    def time_left_s(self) -> float | None:
        """The time until the hosts are taken away, as by a Slurm job's time limit; None where there is no
        limit or nobody knows."""
        return self._state.time_left_s

    @property
    def over(self) -> bool:
        return self._ending.over

    @property
    def is_to_stop(self) -> bool:
        """Whether the run was asked to stop, and is not over."""
        return self._watch.is_to_stop and not self.over

    @property
    def status(self) -> RunState:
        """The state of the run: the state of its ranks, or that of the slowest one if they differ."""
        if self._ending.state is not None:
            return self._ending.state
        states = {s.state for s in self.statuses()} - FINAL_STATES
        if not states and self._concludes:
            # The records still end with the end of the training, until the ranks write again.
            return "working out the result"
        return state_of_slowest(states)

    def statuses(self) -> list[RankStatus]:
        """Return the last known status of every rank, in order."""
        return self.reader.statuses(self._info.devices)

    def _follow_on_ranks(self, config: TrainConfig) -> None:
        """Have the handle show a run that goes on with another number of ranks and with these settings."""
        self.config = config
        self.reader.keep_only(len(self._state.devices))
        self._info = replace(
            _first_info(self.folder, config, self._state),
            total_steps=self.info.total_steps,
            steps_per_epoch=self.info.steps_per_epoch,
        )
        # The present file describes the former ranks, so `info` skips it until rank 0 writes it again.
        path = self.folder / names.INFO
        self._info_written_ns = path.stat().st_mtime_ns if path.exists() else 0

    def metrics(self) -> pd.DataFrame:
        """Return every number that the ranks recorded: one row for each sample, with the columns rank, step,
        time_s (seconds since the epoch) and one for each series."""
        return frame_of(self.reader)

    def step_parts(self) -> pd.DataFrame:
        """Return how long each part of each step took: one row for each step and rank, in seconds.

        The columns from `data_s` to `other_s` add up to `step_s`; on a GPU they can add up to more, because
        the host may be ahead of the device. `waiting_s` is the time for which the rank waited for
        `waited_for`, the rank whose gradients were ready last. `transfer_s` is the part of the gradient
        exchange that did not overlap with the backward pass, and `hidden_s` the part that did.
        """
        return parts_frame(self.reader, self.info.world_size)

    def explain(self, links: Links | None = None) -> Explanation:
        """Say in a few sentences what bounds this run, and what to change first. It prints as text.

        `nbgpu.try_advice` measures what the advice brings.

        Args:
            links: the result of `nbgpu.measure_links()` on the run's ranks. It is needed for advice on the
                size of DDP's buckets, except over a simulated link, whose speed is known.

        Raises:
            RunError: fewer than five steps were recorded, or the recipe's steps have no parts.
        """
        return explaining.explain(self.folder, self.reader, self.config, self.info.world_size, links)

    def timeline(self, steps: int | Iterable[int] | None = None) -> Timeline:
        """Return what every rank did in some steps, moment by moment: a figure in a notebook, a table in
        text, and with `chrome_trace` a file.

        The steps 3 to 5, 10 to 12, 30 to 32, 100 to 102 and so on, and those that `profile` names, are
        recorded in full. Of the other steps only the lengths of their parts are known, not when each bucket
        of gradients was exchanged.

        Args:
            steps: the steps' numbers, counted from 1; None for the newest that were recorded in full.

        Raises:
            ConfigError: a step was not recorded by all ranks, or there are more than 50.
        """
        info = self.info
        profiles = {
            rank: path
            for rank in range(info.world_size)
            if (path := self.folder / names.PROFILES / names.profile(rank)).exists()
        }
        ranks = count_of_ranks(info.world_size)
        title = ", ".join(filter(None, [f"{info.title} on {ranks}", info.simulated]))
        events, records = self.reader.events(), self.reader.records
        return of_run(title, info.world_size, events, records, profiles, steps)

    def result(self) -> Mapping[str, Any] | None:
        """Return the recipe's result of the trained model, beside its baselines, or None until the run has
        finished."""
        results = [event.detail for event in self.reader.events() if event.kind == "result"]
        return results[-1] if results else None

    def show_result(self) -> None:
        """Display the result: what the recipe says of the trained model, its table beside the baselines, and
        its pictures. The saved notebook keeps them. `result` returns the same as a dict.

        Raises:
            RunError: there is no result, because the run goes on, did not finish, or its recipe has none.
        """
        result = self.result()
        if result is None:
            raise RunError(_explain_missing_result(self))
        views = presenting.required("could display a result", "run", ", or read run.result()")
        views.show_result(self, result)

    @property
    def can_work_out_result(self) -> bool:
        """Whether the run ended without a result, and `work_out_result` would give it one."""
        ended = self.status in FINAL_STATES
        return ended and self.result() is None and not _reason_result_is_lost(self)

    @uninterrupted()
    def work_out_result(self) -> Run:
        """Work out the result of a run that ended without one, from its newest checkpoint.

        A run that was stopped, by a person or because the job's time was nearly up, has no result yet. The
        ranks load the checkpoint, validate it if the run validates, and work out the result as at the end of
        any run. The run then counts as finished at that step. Returns at once, and `wait` waits.

        Raises:
            RunError: the run goes on, has a result or no checkpoint, its recipe works none out, or the ranks
                are busy.
        """
        if self.over and self.result() is not None:
            raise RunError(f"{self.folder.name} has its result: run.show_result() shows it")
        if not self.over or _reason_result_is_lost(self):
            raise RunError(_explain_missing_result(self))
        if self._served.is_needed:
            raise RunError(
                f"not all hosts see {self.folder}, where the checkpoint is. Train with "
                f"resume={str(self.folder)!r} up to this step, or in a folder that all hosts share"
            )
        step = checkpoint_files.state(self.checkpoint())["step"]
        config = self.config.counting(steps=step, epochs=None, work_out_result=True, profile="")
        self._conclude(self, step, config)
        return self

    def follow_again(self, config: TrainConfig, results: Mapping[int, Reply]) -> None:
        """Follow the ranks again, which have begun to work out the result of this run.

        Args:
            config: the settings that end the run at its newest checkpoint.
            results: the pending replies to the call that trains, by rank.
        """
        self.config = config
        self._concludes = True
        self._follow(results)

    def notes(self) -> list[str]:
        """Return the notes of the ranks, oldest first, such as of a checkpoint that could not be written or a
        rank that was replaced. After these come the lines of the ranks' files that could not be read, and the
        files that could not be copied from other hosts.
        """
        texts = (event.text for event in self.reader.events() if event.kind in ("note", "heal"))
        # Every rank notes the same replacement.
        return list(dict.fromkeys([*texts, *self.reader.damage(), *self._served.problems]))

    def unreported_heals(self) -> list[str]:
        """Return the messages about ranks that were replaced since the last call, unless a cell has shown
        them: which ranks died, how, and what was lost."""
        heals = self._watch.heals[self._num_heals_reported :]
        self._num_heals_reported += len(heals)
        unreported = [text for text in heals if text in self._state.news]
        for text in unreported:
            # The caller shows the message, so the next cell must not show it again.
            self._state.news.remove(text)
        return unreported

    def export(self, to: str, **settings: Any) -> Exported:
        """Write the files with which this run's training runs elsewhere, without a notebook.

        The exported run begins with the first step; when it is started again, it goes on from its newest
        checkpoint.

        Args:
            to: 'torchrun', 'slurm', 'job', 'jobset' or 'trainjob'; the last three are for Kubernetes.
            settings: where it runs, such as nodes=2, gpus_per_node=4 and time_limit='24:00:00';
                `nbgpu export --help` lists them.

        Raises:
            ConfigError: a setting is bad or the format has no place for it; every mistake is named.
            RunError: the files cannot be written, or are there already.
        """
        return export.of_run(self.folder, to, settings)

    def panel(self) -> None:
        """Display the live panel: loss, memory, utilization and throughput of every rank."""
        presenting.required("could display a panel", "run").show_run(self)

    def pause(self) -> None:
        """Ask all ranks to wait before their next step; they agree on which step that is."""
        self._ask("pause")

    def resume(self) -> None:
        """Let a paused run go on."""
        self._ask("resume")

    def set(self, **settings: Any) -> None:
        """Let the run go on with other settings.

        All ranks take them at the same step; settings of the data take effect with the next epoch. A mark on
        the panels and `changes.jsonl` in the run's folder record where that was.

        Raises:
            ConfigError: a setting cannot be changed now, or its value is not valid; nothing is changed.
            RunError: the run is over.
        """
        possible = steerable(type(self.config))
        if fixed := [name for name in settings if name not in possible]:
            unknown = [name for name in fixed if name not in type(self.config).model_fields]
            meant = "".join(did_you_mean(name, possible) for name in unknown)
            raise ConfigError(
                f"{', '.join(fixed)} cannot be changed while a run goes on.{meant} What can be: "
                f"{', '.join(possible)}"
            )
        config = self.config.changed(**settings)
        if "batch_size" in settings:
            config = config.changed(global_batch_size=None)
            self._refuse_more_than_an_epoch(config)
        config = adapt_to_devices(config, self._state.devices)
        self._require_not_over("be changed")
        values = {name: getattr(config, name) for name in settings}
        self._send(lambda cluster_folder: send_settings(self.folder, values, cluster_folder))
        self.config = config

    def _refuse_more_than_an_epoch(self, config: TrainConfig) -> None:
        """Raise ConfigError if a step would take more than an epoch: it would repeat samples, and perhaps
        exceed the memory."""
        info = self.info
        per_step = config.samples_per_step(info.world_size)
        per_epoch = info.steps_per_epoch * info.global_batch_size  # 0 before the ranks have read the data
        if per_epoch and per_step > per_epoch:
            largest = max(1, per_epoch // (per_step // config.batch_size))
            raise ConfigError(
                f"batch_size = {config.batch_size} would take {per_step} samples in a step, and an epoch takes "
                f"{per_epoch} with the present settings. Give at most {largest}"
            )

    def stop(self, why: str = "") -> None:
        """Ask all ranks to end after their current step; they write a checkpoint first.

        A step in which ranks hang in a collective is interrupted, and a second call interrupts any step.
        Training then goes back to the state before that step and ends with it. With strategy='fsdp' no rank
        has the whole state, and training ends with that of the newest checkpoint.

        Args:
            why: a sentence for the run's record, if something other than a person stops the run.
        """
        self._ask("stop", why)

    def wait(self, timeout_s: float | None = None, progress: bool = True) -> Run:
        """Wait for the end. The kernel's interrupt stops the run, waits until it has stopped, and is then
        raised; a second interrupt interrupts the step, as a second `stop` does.

        Meanwhile a line says how far the run is, in a notebook and in a terminal. Ranks that were replaced
        are reported on stderr, with what was lost.

        Args:
            timeout_s: the longest time to wait, in seconds; None for no limit.
            progress: whether to show the line.

        Raises:
            RankError: the run failed; it shows the ranks' own tracebacks.
            ClusterError: the ranks could no longer be reached while the run went on.
            TimeoutError: the run goes on after `timeout_s` seconds.
        """
        notice = Notice()
        line = ProgressLine(lambda: _progress(self), progress and presenting.presenter is not None)

        def show_progress() -> None:
            line.refresh()
            notice.show(self.hang)
            for text in self.unreported_heals():
                print(text, file=sys.stderr)  # noqa: T201 - the cell's output

        try:
            self._ending.wait(timeout_s, lambda: self.status, self.stop, _STOP_PATIENCE_S, show_progress)
        finally:
            show_progress()
            notice.show("")
            line.finish()
        if (error := self.error) is not None:
            raise error
        return self

    def checkpoint(self, which: Literal["newest", "best"] = "newest") -> Path:
        """Return the folder of the newest intact checkpoint, or of the one with the best validation
        (`best_metric`).

        Raises:
            RunError: there is no such checkpoint; the message names those that are damaged.
        """
        if which == "best":
            return checkpoint_files.best_intact(self.folder, self.config.best_metric)
        return checkpoint_files.newest_intact(self.folder)

    def on_end(self, callback: Callable[[Run], None]) -> None:
        """Call `callback` once: when the run is over and before `wait` returns, or at once if it is over."""
        self._ending.call(lambda: callback(self))

    def abandon(self) -> None:
        """End the handle of a run whose cluster was stopped while the run went on."""
        self._watch.abandoned = True
        self._ending.wait_at_most(_STOP_PATIENCE_S)

    def _ask(self, command: Command, why: str = "") -> None:
        self._require_not_over(command)
        self._send(lambda cluster_folder: send_command(self.folder, command, cluster_folder, why))

    def _send(self, send: Callable[[Path | None], None]) -> None:
        """Send a request to rank 0; raise RunError if it can be written to no folder.

        Args:
            send: writes the request into the run's folder or, if that is gone, full or read-only, into the
                cluster's folder, with which it is called; None for no such second place.
        """
        # Ranks on other hosts do not see the cluster's folder of this one.
        cluster_folder = self._state.folder if self._state.config.is_local else None
        try:
            send(cluster_folder)
        except OSError as error:
            reason = f"neither {self.folder} nor the cluster's folder can be written"
            if cluster_folder is None:
                reason = f"{self.folder} cannot be written"
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Make room and try again" if is_full else "Try again when that is mended"
            raise RunError(
                f"the ranks cannot be reached, because {reason}: {error.strerror}. {remedy}; %nbgpu stop ends the "
                "cluster, and with it the run"
            ) from None

    def _require_not_over(self, what: str) -> None:
        if self.over:
            raise RunError(f"{self.folder.name} is {self.status}: it cannot {what} any more")

    def _follow_to_the_end(self) -> None:
        """Follow the ranks until the run is over, complete its files, and report its end. Runs on a
        thread."""
        state = self._watch.follow()
        serving.finish(self._served, lambda: self._watch.abandoned)
        self._live.close()
        self.reader.close()
        try:
            last_step = max(status.step for status in self.statuses())
            # Rank 0 may have died, or written the logs before the last records of other hosts had come.
            lacks_rows = state == "failed" or (
                self._served.is_needed and metrics_files.lacks_rows(self.folder, self._info.world_size)
            )
            metrics_files.complete(self.folder, last_step, lacks_rows)
        except (NbgpuError, OSError, ValueError) as error:
            _log.warning("the logs of %s are not complete: %s", self.folder.name, error)
        self._ending.complete(state, self._report)

    def _report(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
        if presenting.presenter is not None:
            try:
                presenting.presenter.report_run(self)
            except OSError as error:
                _log.warning(
                    "there is no report of %s, because it cannot be written: %s", self.folder.name, error
                )


def _progress(run: Run) -> Progress:
    """Return the progress of a run, for the line below a cell that waits for it."""
    num_steps = run.info.total_steps
    share = min(status.step for status in run.statuses()) / num_steps if num_steps else None
    return Progress("" if presenting.presenter is None else presenting.presenter.describe_run(run), share)


def _explain_missing_result(run: Run) -> str:
    """Return the error message that says why a run has no result, and what gives it one."""
    name, status = run.folder.name, run.status
    if not run.over:
        return f"{name} has no result yet: it is {status}. run.wait() waits for the end"
    if reason := _reason_result_is_lost(run):
        return reason
    because = "" if status == "finished" else f", because it {_describe_end(status)}"
    return f"{name} has no result{because}. run.work_out_result() works out that of its newest checkpoint"


def _describe_end(status: RunState) -> str:
    return "was stopped" if status == "stopped" else status


def _reason_result_is_lost(run: Run) -> str:
    """Return why the result of a run that is over cannot be worked out; empty if it can."""
    name, config, status = run.folder.name, run.config, run.status
    if "work_out_result" in config.UNUSED or (status == "finished" and config.work_out_result):
        return f"{name} has no result: its recipe works none out"
    if not config.telemetry:
        return f"{name} has no result: with telemetry=False nothing is recorded"
    if config.smoke_test:
        return f"{name} has no result, because the smoke test did not come to its end. Start it again"
    newest = checkpoint_files.newest_whole(run.folder, contents=False).checkpoint
    if newest is None or not checkpoint_files.state(newest)["step"]:
        return f"{name} has no result, because it {_describe_end(status)} before a step was saved"
    return ""


def _leave_missing_outcomes(folder: Path, results: Mapping[int, LeftResult], state: ClusterState) -> None:
    """Record the end of a run for ranks that no longer train and have not recorded it themselves. Otherwise
    `Run.wait` would wait for them for ever."""
    if all(result.ready() for result in results.values()):
        return
    # A rank records its end before it becomes idle, so its record is looked for after it was seen idle.
    for rank in state.idle_ranks():
        if rank in results and not results[rank].ready():
            message = (
                f"rank {rank} does not train any more, and has not recorded why: it was replaced when it had died, "
                f"or could not write to {folder}"
            )
            runs.leave_outcome(folder, rank, RankFailure(rank, "ClusterError", message, message))


def _first_info(folder: Path, config: TrainConfig, state: ClusterState) -> RunInfo:
    """Return the description of a run before the ranks have read the data."""
    return RunInfo(
        run_id=folder.name,
        recipe=config.title,
        devices=state.devices,
        backend=state.backend,
        transport=state.transport.name,
        simulated=state.chosen_transport.simulated,
        total_steps=config.total_steps(steps_per_epoch=0),
        steps_per_epoch=0,
        batch_size=config.batch_size,
        global_batch_size=config.samples_per_step(len(state.devices)),
        started_s=(folder / names.SETTINGS).stat().st_mtime,
        resumed_from=resume.Beginning.read(folder).checkpoint,
        name=config.run_name,
    )
