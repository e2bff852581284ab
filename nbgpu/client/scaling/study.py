"""A study: runs that differ in the number of ranks or in one setting, measured in turns.

A study has a cluster of its own, beside that of the notebook, whose number of ranks it changes from point to
point. Its state is in its folder: what was measured is read from the folders of its runs, so that another
process can go on with it, and later compare it with others.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
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
from nbgpu.machine.files import write_whole
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

StudyState = Literal["measuring", "stopping", "finished", "stopped", "failed"]
"""'finished' if every repeat was measured or has failed; 'failed' if repeats are left and no engines could be
started for them."""


class Study:
    """A study in progress or finished. `nbgpu.scaling` and `nbgpu.study` make one.

    Args:
        folder: the study's folder, with study.toml, a folder for each repeat of each point, and at the end
            repeats.csv and report.html. What is in it counts as measured.

    Raises:
        ConfigError: the folder is not the folder of a study, or its file cannot be used.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the plan and the repeats that were measured from the folder. Nothing is measured before
        `resume`."""
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
        """The repeat and the point that is measured now."""
        self._now_begun_s = 0.0
        self._awaited = ""
        """Why the start of the engines is delayed, such as by a queue; empty while none are started."""
        self._cluster: Cluster | None = None
        self._stopping = threading.Event()
        self._ending: Completion[StudyState] = Completion(self.folder.name, _log)
        self._lost: NbgpuError | None = None
        """The error that ended the study; None if there was none."""
        # A study that is read from its folder is over until `resume`. No report is written at this end,
        # because nothing was measured since.
        self._ending.complete(self._final_status(), lambda: None)

    def __repr__(self) -> str:
        return f"<Study {self.folder.name}: {self.describe()}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The study as text. Tables that are wider than `width` are turned, so that no number is cut."""
        summary = self.summary()
        table = study_table.lines(self.plan, summary, width)
        laws = study_table.law_lines(self.plan, self.measured(), summary)
        return "\n".join([self.describe(), *table, *laws, str(self.folder)])

    def _ipython_display_(self) -> None:
        if presenting.presenter is None:
            print(self)  # noqa: T201 - what stands for the panel
        else:
            presenting.presenter.show_study(self)

    @property
    def over(self) -> bool:
        return self._ending.over

    @property
    def status(self) -> StudyState:
        """The state of the study; 'stopping' after a stop until the present run has ended."""
        if self._ending.state is not None:
            return self._ending.state
        return "stopping" if self._stopping.is_set() else "measuring"

    @property
    def error(self) -> NbgpuError | None:
        """The error that ended the study; None if there was none."""
        return self._lost

    def describe(self) -> str:
        """One line about the progress, such as 'measuring: 4 of 9 repeats done; now ranks = 2, repeat 1 of 3,
        step 5 of 20; about 2 min left'."""
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
            step = max((status.step for status in run.statuses()), default=0) if run is not None else 0
            text += (
                f"; now {self.plan.vary} = {point.value}, repeat {repeat + 1} of {self.plan.config.repeats}, "
                f"step {step} of {point.config.steps}"
            )
        if awaited := self._awaited:
            text += f"; {awaited}"
        left_s = self.seconds_left()
        return text if left_s is None else f"{text}; about {_format_duration(left_s)} left"

    def seconds_left(self) -> float | None:
        """Return the time, in seconds, that the remaining repeats will take, by those measured so far; None
        if none was measured yet, or if the study is over."""
        with self._lock:
            taken = list(self._measured.values())
            now, now_begun_s = self._now, self._now_begun_s
        if self._ending.state is not None or not taken:
            return None
        typical_s = sum(repeat.seconds for repeat in taken) / len(taken)
        by_point: dict[int, list[float]] = {}
        for repeat in taken:
            by_point.setdefault(repeat.point, []).append(repeat.seconds)
        left_s = 0.0
        for _, point in self._remaining():
            of_point = by_point.get(point.number)
            left_s += sum(of_point) / len(of_point) if of_point else typical_s
        # The repeat that is measured now is among those that are left.
        return max(0.0, left_s - (time.monotonic() - now_begun_s if now is not None else 0.0))

    def measured(self) -> list[Measured]:
        """The repeats that were measured or have failed so far, in order of repeat and point."""
        with self._lock:
            return [repeat for _, repeat in sorted(self._measured.items())]

    def summary(self) -> list[PointSummary | Gap]:
        """The points with medians and intervals, in order; a Gap for each point without a measured repeat."""
        points = [(point.value, point.ranks, point.samples_per_step) for point in self.points]
        return summarise(points, self.measured())

    def verdict(self, value: Any = None) -> str:
        """Return in one line how fast the point with this value is compared with the first point; with None,
        which point is the fastest. If the intervals do not decide this, the line says so, and what
        measurement would.

        Raises:
            KeyError: there is no such point, or it was not measured.
        """
        return study_table.verdict(self.plan, self.summary(), value)

    def frame(self) -> pd.DataFrame:
        """One row for each point: medians, intervals, speed-up, efficiency and the parts of a step."""
        return study_table.frame(self.plan, self.summary())

    def repeats(self) -> pd.DataFrame:
        """One row for each repeat of each point."""
        return study_table.repeats(self.plan, self.points, self.measured())

    def losses(self) -> pd.DataFrame:
        """One row for each step of each repeat: the mean of the ranks' losses, the samples seen, and the
        seconds of training up to it."""
        return study_table.losses(self.plan, self.points, self.measured())

    def figure(self) -> Any:
        """The charts as a Plotly figure: speed-up or samples per second, and the parts of a step."""
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
        """Return the point that `explain` speaks of, with the same errors."""
        matching = [point for point in self.points if value is None or point.value == value]
        if not matching:
            raise ConfigError(f"{self.plan.vary} = {value} is not a point. Points: {list(self.plan.values)}")
        measured = {repeat.point for repeat in self.measured() if repeat.step_s}
        point = next((point for point in reversed(matching) if point.number in measured), None)
        if point is None:
            asked = "any point" if value is None else f"{self.plan.vary} = {value}"
            raise RunError(f"no repeat of {asked} was measured")
        return point

    def _efficiency(self, point: StudyPoint) -> list[str]:
        """Return one sentence on the speed-up and the efficiency of a point. The list is empty if the study
        does not vary the number of ranks, if the point was not measured (a `Gap`), or if it has as many ranks
        as the first point, with which the others are compared."""
        summary = self.summary()[point.number]
        if self.plan.vary != studies.RANKS or not isinstance(summary, PointSummary) or summary.ideal == 1:
            return []
        low, high = summary.relative_between
        # `ideal` is the number of ranks divided by that of the first point.
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
        """End the study after the current step of its run. Measured repeats stay, and `resume` goes on with
        the others."""
        self._stopping.set()
        run = self._run
        with suppress(RunError):  # the run may end at this very moment, which is just as good
            if run is not None:
                run.stop()

    def wait(self, timeout_s: float | None = None, progress: bool = True) -> Study:
        """Wait for the end. An interrupt of the kernel stops the study, and is then raised.

        Meanwhile a line says how far the study is, in a notebook and in a terminal. A point that fails raises
        nothing here: its reason stands in the table.

        Args:
            timeout_s: the time after which it gives up; None to wait as long as it takes.
            progress: whether to show the line.

        Raises:
            ClusterError: repeats are left, and no engines could be started for them.
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
        """The line of `wait`. The repeat that is measured now counts by its steps."""
        num_all = len(self.points) * self.plan.config.repeats
        with self._lock:
            num_done, now, run = len(self._measured), self._now, self._run
        part = 0.0
        if now is not None and run is not None:
            step = max((status.step for status in run.statuses()), default=0)
            part = step / now[1].config.steps if now[1].config.steps else 0.0
        return Progress(self.describe(), min(1.0, (num_done + part) / num_all))

    def on_end(self, callback: Callable[[Study], None]) -> None:
        """Call back once when the study is over, before `wait` returns; at once where it is over already."""
        self._ending.call(lambda: callback(self))

    def resume(self) -> Study:
        """Measure what is missing: repeats that were not reached, and those that failed. Returns at once.

        Raises:
            ClusterError: a GPU is in use by a cluster.
            RunError: the study is running already, here or in another process.
        """
        if self._ending.state is not None:
            # It is shown as ended a moment before its report is written.
            self._ending.wait_at_most(_STOP_PATIENCE_S)
        if not self._ending.over:
            raise RunError(f"{self.folder.name} is running already")
        ranks = max(point.ranks for point in self.points)
        cluster = cluster_with(self.plan.point_cluster(ranks))
        if not cluster.config.share_gpus:
            registry.require_free(cluster.devices)
        claim = files.lock_folder(self.folder)
        with self._lock:
            self._measured = {key: repeat for key, repeat in self._measured.items() if not repeat.why_failed}
        self._stopping.clear()
        self._lost = None
        self._ending = Completion(self.folder.name, _log)
        atexit.register(self._abandon)
        threading.Thread(target=self._measure_all, args=(claim,), name="nbgpu-study", daemon=True).start()
        return self

    def _remaining(self) -> list[tuple[int, StudyPoint]]:
        """The repeats still to be measured, as (repeat, point) in the order of measurement."""
        with self._lock:
            done = set(self._measured)
        pairs = studies.order(len(self.points), self.plan.config.repeats)
        return [(repeat, self.points[number]) for repeat, number in pairs if (repeat, number) not in done]

    # The methods below run in the study's thread.

    def _measure_all(self, claim: int) -> None:
        """Measure the repeats that are left, one after the other; then stop the study's cluster, write the
        table and end the study. `claim` is the file descriptor of the lock on the folder."""
        left = deque(self._remaining())
        failed: dict[int, str] = {}
        try:
            while left and not self._stopping.is_set():
                repeat, point = left.popleft()
                if why := failed.get(point.number):
                    # It would take long to fail in the same way again.
                    self._record(Measured(point.number, repeat, (), why_failed=why))
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
            if self._cluster is not None:
                self._cluster.stop()
                self._cluster = None
            with self._lock:
                self._now = self._run = None
        atexit.unregister(self._abandon)
        self._write_table()
        # The lock is released before the study counts as over, so that `resume` can take it at once.
        os.close(claim)
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
            # Count from here: the first start of the engines takes much longer than a repeat.
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
            # After the error a GPU may be unusable, or memory still be taken, so the next point gets new
            # engines.
            if self._cluster is not None:
                self._cluster.stop()
                self._cluster = None
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
                self._cluster.parts.lifecycle.start(tell=self._show_awaited, stop=self._stopping)
            finally:
                self._show_awaited("")
            self._note_hosts(self._cluster)
        if self._cluster.world_size != ranks:
            self._cluster.resize(ranks)
        return self._cluster

    def _show_awaited(self, what: str) -> None:
        """Show in the study's progress what the start of engines waits for, such as a job in a queue."""
        self._awaited = what.strip()

    def _note_hosts(self, cluster: Cluster) -> None:
        """Save the names of the study's other hosts, once they are started for the first time."""
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
            write_whole(self.folder / TABLE, self.repeats().to_csv(index=False))
        except OSError as error:
            # The study goes on: the table can be written again from the measurements.
            _log.warning("the table of %s could not be written: %s", self.folder.name, error)

    def _report(self) -> None:
        if presenting.presenter is not None:
            presenting.presenter.report_study(self)

    def _abandon(self) -> None:
        """Stop the engines when the interpreter exits. `resume` measures the present repeat again."""
        self._stopping.set()
        if self._cluster is not None:
            self._cluster.stop()


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
