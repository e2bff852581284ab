"""A study: runs that differ in the number of ranks or in one setting, measured in turns.

A study has a cluster of its own, separate from that of the notebook, and changes its number of ranks from
point to point. The measurements are read from the folders of its runs, so another process can continue the
study, or compare it with others.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from nbgpu.client import presenting
from nbgpu.client.cluster.cluster import Cluster, cluster_with
from nbgpu.client.host import registry
from nbgpu.client.ipykernel.notice import Progress, ProgressLine
from nbgpu.client.runs.ending import Completion
from nbgpu.client.runs.run import Run
from nbgpu.client.scaling import measured_runs, study_table
from nbgpu.client.scaling.comparison import ComparedStudy, Comparison
from nbgpu.errors import ClusterError, ConfigError, NbgpuError, RunError
from nbgpu.machine import files
from nbgpu.performance.bottlenecks import Explanation
from nbgpu.performance.study_results import Gap, Measured, PointSummary, summarise
from nbgpu.planning import studies
from nbgpu.planning.studies import StudyPlan, StudyPoint

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("nbgpu.study")
_STOP_PATIENCE_S = 30.0
"""After a second interrupt `wait` returns within this time, even if the study has not ended."""
TABLE = "repeats.csv"
"""The file in a study's folder with a row for each repeat."""

StudyState = Literal["measuring", "stopping", "finished", "stopped", "failed"]
"""'finished' if every repeat was measured, or has failed with an error of nbgpu, such as engines that do not
start; 'failed' if another error ended the study, such as a full disk."""


class Study:
    """A study in progress or finished. `nbgpu.scaling` and `nbgpu.study` make one.

    Args:
        folder: the study's folder, with study.toml, a folder for each repeat of each point, and at the end
            repeats.csv and report.html. The repeats in it count as measured.

    Raises:
        ConfigError: the folder is not the folder of a study, or its file cannot be used.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the plan and the measured repeats from the folder. Nothing is measured before `resume`."""
        self.folder = Path(folder).absolute()
        plan, environment = StudyPlan.read(self.folder)
        self.plan: StudyPlan = plan
        self.environment: Mapping[str, Any] = environment
        """The hosts, devices and versions on which the study was first measured."""
        self.points: Sequence[StudyPoint] = plan.points()
        self._lock = threading.Lock()
        self._measured: dict[tuple[int, int], Measured] = measured_runs.read_finished(
            self.folder, self.points, plan.config
        )
        """The measured repeats, by repeat and point."""
        self._run: Run | None = None
        self._now: tuple[int, StudyPoint] | None = None
        """(the repeat, the point) that are measured now; None if none are."""
        self._now_begun_s = 0.0
        self._delay = ""
        """Why the start of the engines is delayed, such as by a queue; empty if it is not."""
        self._cluster: Cluster | None = None
        self._stopping = threading.Event()
        self._ending: Completion[StudyState] = Completion(self.folder.name, _log)
        self._lost: NbgpuError | None = None
        """The error that ended the study; None if there was none."""
        # A study that is read from its folder is over until `resume`. It needs no new report.
        self._ending.complete(self._final_status(), lambda: None)

    def __repr__(self) -> str:
        return f"<Study {self.folder.name}: {self.describe()}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the study as text. Tables that are wider than `width` characters are transposed."""
        summary = self.summary()
        table = study_table.lines(self.plan, summary, width)
        laws = study_table.law_lines(self.plan, self.measured(), summary)
        return "\n".join([self.describe(), *table, *laws, str(self.folder)])

    def _ipython_display_(self) -> None:
        if presenting.presenter is None:
            print(self)  # noqa: T201 - in place of the panel
        else:
            presenting.presenter.show_study(self)

    @property
    def over(self) -> bool:
        return self._ending.over

    @property
    def status(self) -> StudyState:
        """The state of the study; 'stopping' from a stop until the present run has ended."""
        if self._ending.state is not None:
            return self._ending.state
        return "stopping" if self._stopping.is_set() else "measuring"

    @property
    def error(self) -> NbgpuError | None:
        """The error that ended the study; None if there was none."""
        return self._lost

    def describe(self) -> str:
        """Return a line about the progress, such as 'measuring: 4 of 9 repeats done; now ranks = 2, repeat 1
        of 3, step 5 of 20; about 2 min left'."""
        num_all = len(self.points) * self.plan.config.repeats
        with self._lock:
            measured = list(self._measured.values())
            now, run = self._now, self._run
        failed = sum(bool(repeat.why_failed) for repeat in measured)
        text = f"{self.status}: {len(measured)} of {num_all} repeats done"
        if failed:
            text += f", {failed} failed"
        if now is not None:
            repeat, point = now
            text += (
                f"; now {self.plan.vary} = {point.value}, repeat {repeat + 1} of {self.plan.config.repeats}, "
                f"step {_newest_step(run)} of {point.config.steps}"
            )
        if delay := self._delay:
            text += f"; {delay}"
        left_s = self.seconds_left()
        return text if left_s is None else f"{text}; about {_format_duration(left_s)} left"

    def seconds_left(self) -> float | None:
        """Return the time, in seconds, that the remaining repeats will take: each the mean time of the
        measured repeats of its point or, without such, of all points. None if none was measured yet, or if
        the study is over."""
        with self._lock:
            measured = list(self._measured.values())
            now, now_begun_s = self._now, self._now_begun_s
        if self._ending.state is not None or not measured:
            return None
        left_s = 0.0
        for _, point in self._remaining():
            same_point = [repeat for repeat in measured if repeat.point == point.number]
            left_s += mean(repeat.seconds for repeat in same_point or measured)
        # The repeat that is measured now is among the remaining ones.
        return max(0.0, left_s - (time.monotonic() - now_begun_s if now is not None else 0.0))

    def measured(self) -> list[Measured]:
        """Return the repeats that were measured or have failed so far, in order of repeat and point."""
        with self._lock:
            return [repeat for _, repeat in sorted(self._measured.items())]

    def summary(self) -> list[PointSummary | Gap]:
        """Return each point with medians and intervals, in order; a Gap if it has no measured repeat."""
        points = [(point.value, point.ranks, point.samples_per_step) for point in self.points]
        return summarise(points, self.measured())

    def verdict(self, value: Any = None) -> str:
        """Return a line that says how fast the point with this value is compared with the reference, which is
        the measured point with the fewest ranks; with None, which point is the fastest. If the intervals
        overlap, the line says so, and which measurement would decide.

        Raises:
            KeyError: there is no such point, or it was not measured.
        """
        return study_table.verdict(self.plan, self.summary(), value)

    def frame(self) -> pd.DataFrame:
        """Return a table with one row for each point: medians, intervals, speed-up, efficiency and the parts
        of a step. Times are in seconds."""
        return study_table.frame(self.plan, self.summary())

    def repeats(self) -> pd.DataFrame:
        """Return a table with one row for each repeat of each point. Times are in seconds."""
        return study_table.repeats(self.plan, self.points, self.measured())

    def losses(self) -> pd.DataFrame:
        """Return a table with one row for each step of each repeat: the mean of the ranks' losses, and the
        number of samples and the seconds of training up to that step."""
        return study_table.losses(self.plan, self.points, self.measured())

    def figure(self) -> Any:
        """Return the charts as a Plotly figure: speed-up or samples per second, and the parts of a step."""
        return presenting.required("draws", "study").figure_of_study(self)

    def explain(self, value: Any = None) -> Explanation:
        """Say in a few sentences what bounds the runs of a point, and what to change first.

        Args:
            value: the value of the varied setting; None for the last point that was measured.

        Raises:
            ConfigError: the study has no such point.
            RunError: the point was not measured.
        """
        point = self.explained_point(value)
        explanation = measured_runs.explain(self.folder, point, self.plan.config)
        return replace(explanation, sentences=[*explanation.sentences, *self._efficiency(point)])

    def explained_point(self, value: Any = None) -> StudyPoint:
        """Return the point that `explain` explains; raises the errors of `explain`."""
        matching = [point for point in self.points if value is None or point.value == value]
        if not matching:
            raise ConfigError(f"{self.plan.vary} = {value} is not a point. Points: {list(self.plan.values)}")
        measured = {repeat.point for repeat in self.measured() if repeat.step_s}
        point = next((point for point in reversed(matching) if point.number in measured), None)
        if point is None:
            named = "any point" if value is None else f"{self.plan.vary} = {value}"
            raise RunError(f"no repeat of {named} was measured")
        return point

    def _efficiency(self, point: StudyPoint) -> list[str]:
        """Return a sentence about the speed-up and the efficiency of a point, compared with the reference
        (see `verdict`). It is empty for the reference itself, for a point that was not measured, and if the
        study does not vary the number of ranks."""
        summary = self.summary()[point.number]
        # `ideal` is the number of ranks divided by that of the point compared with.
        if self.plan.vary != studies.RANKS or not isinstance(summary, PointSummary) or summary.ideal == 1:
            return []
        low, high = summary.relative_between
        return [
            f"{point.ranks} ranks train {summary.relative:.2f} times as many samples per second as "
            f"{point.ranks / summary.ideal:.0f} ({low:.2f} to {high:.2f}), an efficiency of {summary.efficiency:.0%}."
        ]

    def compare(self, other: Study) -> Comparison:
        """Compare each point with that of another study, measured on another day or machine.

        Raises:
            ConfigError: the studies have no point in common.
        """
        first, second = (
            ComparedStudy(study.folder.name, study.plan, study.environment, study.summary())
            for study in (self, other)
        )
        return Comparison(first, second)

    def panel(self) -> None:
        """Display the live panel: progress, charts and a table."""
        presenting.required("could display a panel", "study").show_study(self)

    def stop(self) -> None:
        """End the study after the current step of its run. Measured repeats are kept, and `resume` goes on
        with the others."""
        self._stopping.set()
        run = self._run
        with suppress(RunError):  # the run may have ended a moment before
            if run is not None:
                run.stop()

    def wait(self, timeout_s: float | None = None, progress: bool = True) -> Study:
        """Wait for the end. An interrupt of the kernel stops the study, and is then raised.

        Meanwhile a line says how far the study is, in a notebook and in a terminal. If a point fails, no
        error is raised, and the table has the reason.

        Args:
            timeout_s: the longest time to wait, in seconds; None for no limit.
            progress: whether to show the line.

        Raises:
            ClusterError: another error than those of nbgpu ended the study, such as a full disk.
            TimeoutError: the study goes on after `timeout_s` seconds.
        """
        line = ProgressLine(self._progress, progress)
        try:
            self._ending.wait(timeout_s, self.describe, self.stop, _STOP_PATIENCE_S, meanwhile=line.refresh)
        finally:
            line.finish()
        if self.status == "failed" and self._lost is not None:
            raise self._lost
        return self

    def _progress(self) -> Progress:
        """Return the line that `wait` shows. The share that is done includes the steps of the present
        repeat."""
        num_all = len(self.points) * self.plan.config.repeats
        with self._lock:
            num_done, now, run = len(self._measured), self._now, self._run
        num_steps = now[1].config.steps if now is not None else 0
        present = _newest_step(run) / num_steps if num_steps else 0.0
        return Progress(self.describe(), min(1.0, (num_done + present) / num_all))

    def on_end(self, callback: Callable[[Study], None]) -> None:
        """Call `callback` once: at the end of the study, before `wait` returns, or at once if it is over."""
        self._ending.call(lambda: callback(self))

    def resume(self) -> Study:
        """Measure the remaining repeats, and those that failed. Returns at once.

        Raises:
            ClusterError: a GPU is in use by a cluster.
            RunError: the study is running already, here or in another process.
        """
        if self._ending.state is not None:
            # The state is set a moment before the report is written.
            self._ending.wait_at_most(_STOP_PATIENCE_S)
        if not self._ending.over:
            raise RunError(f"{self.folder.name} is running already")
        ranks = max(point.ranks for point in self.points)
        cluster = cluster_with(self.plan.point_cluster(ranks))
        if not cluster.config.share_gpus:
            registry.require_free(cluster.devices)
        lock = files.lock_folder(self.folder)
        with self._lock:
            self._measured = {key: repeat for key, repeat in self._measured.items() if not repeat.why_failed}
        self._stopping.clear()
        self._lost = None
        self._ending = Completion(self.folder.name, _log)
        atexit.register(self._abandon)
        threading.Thread(target=self._measure_all, args=(lock,), name="nbgpu-study", daemon=True).start()
        return self

    def _remaining(self) -> list[tuple[int, StudyPoint]]:
        """Return the repeats that are not measured yet, as (repeat, point), in the order of measurement."""
        with self._lock:
            done = set(self._measured)
        pairs = studies.order(len(self.points), self.plan.config.repeats)
        return [(repeat, self.points[number]) for repeat, number in pairs if (repeat, number) not in done]

    # The methods below run in the study's thread.

    def _measure_all(self, lock: int) -> None:
        """Measure the remaining repeats one after the other; then stop the study's cluster, write the table
        and end the study. `lock` is the file descriptor of the lock on the folder."""
        failed: dict[int, str] = {}
        try:
            for repeat, point in self._remaining():
                if self._stopping.is_set():
                    break
                if reason := failed.get(point.number):
                    # Another repeat of this point would probably fail in the same way.
                    self._record(Measured(point.number, repeat, (), why_failed=reason))
                    continue
                outcome = self._measure(repeat, point)
                if outcome is None:
                    break
                if outcome.why_failed:
                    failed[point.number] = outcome.why_failed
                self._record(outcome)
        except Exception as error:  # noqa: BLE001
            # `wait` raises the error.
            _log.exception("%s failed", self.folder.name)
            self._lost = (
                error if isinstance(error, NbgpuError) else ClusterError(f"the study failed: {error!r}")
            )
        finally:
            self._stop_cluster()
            with self._lock:
                self._now = self._run = None
        atexit.unregister(self._abandon)
        self._write_table()
        # Release the lock before the study counts as over, so that `resume` can take it at once.
        os.close(lock)
        self._ending.complete(self._final_status(), self._report)

    def _final_status(self) -> StudyState:
        if self._lost is not None and not self._stopping.is_set():
            return "failed"
        return "stopped" if self._remaining() else "finished"

    def _measure(self, repeat: int, point: StudyPoint) -> Measured | None:
        """Measure one repeat; return None if the study was stopped meanwhile."""
        with self._lock:
            self._now, self._now_begun_s = (repeat, point), time.monotonic()
        folder = measured_runs.repeat_folder(self.folder, repeat, point.number)
        run: Run | None = None
        try:
            cluster = self._cluster_with(point.ranks)
            # Measure the time from here, without the start of the engines, which takes longer than a repeat.
            self._now_begun_s = time.monotonic()
            run = cluster.parts.runs.train_with(point.config.changed(runs_dir=str(folder)))
            with self._lock:
                self._run = run
            if self._stopping.is_set():
                self.stop()
            run.wait(progress=False)
            if run.status == "stopped":
                return None
            outcome = measured_runs.read_measurement(run.reader, repeat, point, self.plan.config)
        except NbgpuError as error:
            if self._stopping.is_set() and run is None:
                return None
            outcome = Measured(point.number, repeat, (), why_failed=f"{type(error).__name__}: {error}")
            # After an error the GPU may be unusable or its memory taken, so the next point gets new engines.
            self._stop_cluster()
        finally:
            with self._lock:
                self._now = self._run = None
        return replace(outcome, seconds=time.monotonic() - self._now_begun_s)

    def _cluster_with(self, ranks: int) -> Cluster:
        """Return the study's cluster with this number of ranks: started, restarted or resized as needed."""
        if self._cluster is not None and not self._cluster.running:
            self._cluster = None
        if self._cluster is None:
            self._cluster = cluster_with(self.plan.point_cluster(ranks))
            try:
                self._cluster.parts.lifecycle.start(tell=self._show_delay, stop=self._stopping)
            finally:
                self._show_delay("")
            self._note_hosts(self._cluster)
        if self._cluster.world_size != ranks:
            self._cluster.resize(ranks)
        return self._cluster

    def _stop_cluster(self) -> None:
        """Stop the study's cluster, if there is one. An error is logged, because otherwise `wait` would wait
        for ever."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            try:
                cluster.stop()
            except (NbgpuError, OSError):
                _log.exception("the cluster of %s could not be stopped", self.folder.name)

    def _show_delay(self, text: str) -> None:
        """Show in the study's progress why the start of engines is delayed, such as by a queue."""
        self._delay = text.strip()

    def _note_hosts(self, cluster: Cluster) -> None:
        """Save the names and cores of the other hosts, when they are started for the first time."""
        hosts = {host.name: host.description.num_cores for host in cluster.parts.state.pool.with_ranks}
        if not hosts or self.environment["host"]:
            return
        transport = cluster.parts.state.chosen_transport.describe()
        self.environment = measured_runs.environment(cluster.devices, transport, hosts)
        self.plan.write(self.folder, self.environment)

    def _record(self, outcome: Measured) -> None:
        with self._lock:
            self._measured[outcome.repeat, outcome.point] = outcome
        measured_runs.write_outcome(self.folder, outcome)
        self._write_table()

    def _write_table(self) -> None:
        """Write the repeats measured so far to repeats.csv, which other programs can read at any time."""
        try:
            files.write_whole(self.folder / TABLE, self.repeats().to_csv(index=False))
        except OSError as error:
            # The study goes on, because the table can be written again from the measurements.
            _log.warning("the table of %s could not be written: %s", self.folder.name, error)

    def _report(self) -> None:
        if presenting.presenter is not None:
            presenting.presenter.report_study(self)

    def _abandon(self) -> None:
        """Stop the engines when the interpreter exits. `resume` measures the present repeat again."""
        self._stopping.set()
        if self._cluster is not None:
            self._cluster.stop()


def _newest_step(run: Run | None) -> int:
    return max((status.step for status in run.statuses()), default=0) if run is not None else 0


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
