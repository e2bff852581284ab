"""A sweep: many training runs with different settings, as many side by side as the devices allow.

Trials train in places. A place is a cluster, with its own GPUs or its share of the CPU, and a thread that
trains one trial after the other on it. The state of a sweep is in its folder, so that another process can
resume it.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nbgpu.client import presenting
from nbgpu.client.cluster.cluster import Cluster
from nbgpu.client.ipykernel.notice import Progress, ProgressLine
from nbgpu.client.runs.ending import Completion
from nbgpu.client.sweeps.trial import Trial
from nbgpu.errors import ClusterError, NbgpuError, RunError
from nbgpu.machine.files import lock_folder, write_whole
from nbgpu.planning import trials

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("nbgpu.sweep")
_STOP_POLL_S = 0.5
"""The period in which a place that waits for the starts of others checks whether the sweep is stopping."""
_STOP_PATIENCE_S = 30.0
"""After a second interrupt `wait` returns within this time, even if the sweep has not ended."""
TABLE = "table.csv"

SweepState = Literal["running", "stopping", "finished", "stopped", "failed"]
"""'finished' if every trial is over, even if some failed; 'failed' if trials are left and no place can train
them."""


class Sweep:
    """A sweep, running or over. `nbgpu.sweep` makes one.

    Attributes:
        folder: the folder with sweep.toml, a folder for each trial, and at the end table.csv and report.html.
        plan: the plan that the user asked for.
        trials: the trials in the order in which they start.
    """

    def __init__(self, folder: Path, plan: trials.SweepPlan, clusters: Sequence[Cluster]) -> None:
        """Lock the folder, read the states of the trials from it, and start the thread that trains those that
        are not over."""
        self.folder = folder
        self.plan = plan
        self._lock_fd = lock_folder(folder)
        self.trials = [
            Trial(
                number,
                plan.asked(number),
                plan.settings(number),
                folder,
                plan.config.sort_by,
                plan.config.goal,
            )
            for number in range(len(plan.trials))
        ]
        try:
            for trial in self.trials:
                trial.read_earlier_runs()
        except BaseException:
            # Otherwise the next attempt would find the folder locked.
            os.close(self._lock_fd)
            raise
        self._queue = deque(trial for trial in self.trials if not trial.over)
        self.num_parallel = min(len(clusters), len(self._queue))
        """The number of trials that train side by side."""
        self._clusters = clusters[: self.num_parallel]
        self._num_starting = 0
        """The number of places that have taken a trial and have no engines for it yet."""
        self._starts = threading.Condition()
        """Guards `_queue` and `_num_starting`."""
        self._table_lock = threading.Lock()
        self._stopping = threading.Event()
        self._ending: Completion[SweepState] = Completion(folder.name, _log)
        self._place_errors: list[NbgpuError] = []
        """The errors that have made places take no more trials."""
        atexit.register(self._abandon)
        threading.Thread(target=self._run_trials, name="nbgpu-sweep", daemon=True).start()

    def __repr__(self) -> str:
        return f"<Sweep {self.folder.name}: {self.describe()}>"

    def _ipython_display_(self) -> None:
        if presenting.presenter is None:
            print(repr(self))  # noqa: T201 - what stands for the panel
        else:
            presenting.presenter.show_sweep(self)

    @property
    def over(self) -> bool:
        return self._ending.over

    @property
    def status(self) -> SweepState:
        """The state of the sweep; 'stopping' after a stop until all runs have ended."""
        if self._ending.state is not None:
            return self._ending.state
        return "stopping" if self._stopping.is_set() else "running"

    @property
    def best(self) -> Trial | None:
        """The trial with the best value so far; None before there is one."""
        compared = [trial for trial in self.trials if trial.best is not None]
        return min(compared, key=self._order, default=None)

    def describe(self) -> str:
        """Return one line about the progress: 'running: 3 of 8 trials finished, 1 failed, 2 wait, 2 at work;
        best val_loss 0.0123 (lr=0.001)'."""
        nums: Counter[str] = Counter(trial.state for trial in self.trials)
        num_at_work = len(self.trials) - sum(nums[s] for s in ("finished", "failed", "waiting", "stopped"))
        parts = [
            f"{nums['finished']} of {len(self.trials)} trials finished",
            f"{nums['failed']} failed" if nums["failed"] else "",
            f"{nums['waiting']} wait" if nums["waiting"] else "",
            f"{num_at_work} at work" if num_at_work else "",
            f"{nums['stopped']} stopped" if nums["stopped"] else "",
        ]
        text = f"{self.status}: {', '.join(filter(None, parts))}"
        best = self.best
        if best is not None and best.best is not None:
            text += f"; best {self.plan.config.sort_by} {best.best[1]:.4g} ({best.label})"
        return text

    def table(self) -> pd.DataFrame:
        """A frame with one row for each trial, the best first: settings, state, step, loss, best value and
        its step, seconds, error and folder."""
        # pandas is imported here, because that takes a third of a second, which would slow every import of
        # this module.
        import pandas as pd

        sort_by = self.plan.config.sort_by
        rows = []
        for trial in self.ranking():
            best = trial.best
            rows.append(
                {
                    "trial": trial.number,
                    "state": trial.state,
                    **trial.settings,
                    "step": trial.step,
                    "loss": trial.loss,
                    f"best {sort_by}": None if best is None else best[1],
                    "at step": None if best is None else best[0],
                    "seconds": round(trial.seconds, 1),
                    "error": "" if trial.error is None else str(trial.error),
                    "folder": str(trial.folder),
                }
            )
        frame = pd.DataFrame(rows)
        numbers = ["loss", f"best {sort_by}", "at step"]
        frame[numbers] = frame[numbers].astype(dict.fromkeys(numbers[:2], float) | {"at step": "Int64"})
        return frame

    def ranking(self) -> list[Trial]:
        """The trials, the best first; those without a value come last, in their order."""
        return sorted(self.trials, key=self._order)

    def _order(self, trial: Trial) -> tuple[float, int]:
        """The sort key of a trial: smaller is better."""
        best = trial.best
        if best is None:
            return math.inf, trial.number
        return best[1] * (1 if self.plan.config.goal == "min" else -1), trial.number

    def panel(self) -> None:
        """Display the live panel: a table of the trials, and a chart with a line for each."""
        presenting.required("could display a panel", "sweep").show_sweep(self)

    def stop(self) -> None:
        """Ask all runs to end with a checkpoint after their current step. `wait` waits for that, and
        `nbgpu.sweep(resume=sweep.folder)` continues the sweep."""
        self._stopping.set()
        for trial in self.trials:
            trial.stop_run()

    def wait(self, timeout_s: float | None = None, progress: bool = True) -> Sweep:
        """Wait for the end. An interrupt of the kernel stops all runs, waits for them, and is then raised.

        Meanwhile a line shows the progress, in a notebook and in a terminal. A trial that fails raises
        nothing here: its error is in the table and in `trial.error`.

        Args:
            timeout_s: the longest wait, in seconds; None for no limit.
            progress: whether to show the line.

        Returns:
            This sweep.

        Raises:
            NbgpuError: trials are left, and no engines could be started for them.
            TimeoutError: the sweep is not over after `timeout_s` seconds.
        """
        line = ProgressLine(self._progress, progress)
        try:
            self._ending.wait(timeout_s, self.describe, self.stop, _STOP_PATIENCE_S, meanwhile=line.refresh)
        finally:
            line.finish()
        if self.status == "failed":
            raise self._place_errors[0]
        return self

    def _progress(self) -> Progress:
        shares = [
            t.step / t.total_steps if t.total_steps and not t.over else float(t.over) for t in self.trials
        ]
        return Progress(self.describe(), sum(shares) / len(shares))

    def on_end(self, callback: Callable[[Sweep], None]) -> None:
        """Call back once when the sweep is over, before `wait` returns; at once where it is over already."""
        self._ending.call(lambda: callback(self))

    # The methods below run in threads.

    def _run_trials(self) -> None:
        """Start a thread for each place, wait until all of them have ended, and end the sweep."""
        threads = [
            threading.Thread(target=self._work, args=(cluster,), name=f"nbgpu-sweep-{i}", daemon=True)
            for i, cluster in enumerate(self._clusters)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        atexit.unregister(self._abandon)
        self._write_table()
        os.close(self._lock_fd)
        self._ending.complete(self._final_status(), self._report)

    def _report(self) -> None:
        if presenting.presenter is not None:
            presenting.presenter.report_sweep(self)

    def _final_status(self) -> SweepState:
        if all(trial.state in ("finished", "failed") for trial in self.trials):
            return "finished"
        return "failed" if self._place_errors and not self._stopping.is_set() else "stopped"

    def _work(self, cluster: Cluster) -> None:
        """Train one trial after the other on the cluster of one place. This is the function of its thread."""
        try:
            while (trial := self._take_trial()) is not None and self._start_engines(cluster, trial):
                self._train(trial, cluster)
                self._write_table()
        except Exception as error:  # noqa: BLE001
            # The other places go on, and `wait` raises the error.
            _log.exception("a place of %s failed", self.folder.name)
            self._place_errors.append(ClusterError(f"a place of {self.folder.name} failed: {error!r}"))
        finally:
            cluster.stop()

    def _take_trial(self) -> Trial | None:
        """Take the next trial from the queue; None once no trial is left or the sweep is stopping. If the
        queue is empty, wait for the places that start engines: one that fails puts its trial back."""
        with self._starts:
            while not self._stopping.is_set():
                if self._queue:
                    self._num_starting += 1
                    return self._queue.popleft()
                if not self._num_starting:
                    return None
                self._starts.wait(_STOP_POLL_S)
        return None

    def _start_engines(self, cluster: Cluster, trial: Trial) -> bool:
        """Start the engines of a place, if they do not run, for a trial that the place has taken.

        Returns:
            Whether to train the trial. Otherwise the engines did not start, or the sweep is stopping, and the
            place takes no more trials.
        """
        try:
            if not cluster.running:
                cluster.parts.lifecycle.start(stop=self._stopping)
        except Exception as error:  # noqa: BLE001
            # Another place may train the trial.
            self._end_start(put_back=trial)
            if not self._stopping.is_set():
                if not isinstance(error, NbgpuError):
                    _log.exception("the start of engines for trial %d failed", trial.number)
                    error = ClusterError(f"the engines could not be started: {type(error).__name__}: {error}")
                self._place_errors.append(error)
                _log.warning("no engines for trial %d: %s", trial.number, error)
            return False
        self._end_start()
        # In a sweep that is stopping the trial stays 'waiting', so that a resumed sweep trains it.
        return not self._stopping.is_set()

    def _end_start(self, put_back: Trial | None = None) -> None:
        """Tell the other places that this one no longer starts engines. Without engines it puts its trial
        back."""
        with self._starts:
            self._num_starting -= 1
            if put_back is not None:
                self._queue.appendleft(put_back)
            self._starts.notify_all()

    def _train(self, trial: Trial, cluster: Cluster) -> None:
        """Train one trial until it ends in any way."""
        try:
            run = cluster.parts.runs.train_with(trial.next_config())
            trial.begin_run(run)
            if self._stopping.is_set():
                trial.stop_run()
            run.wait(progress=False)
            trial.end_run(run.status)
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, NbgpuError):
                _log.exception("trial %d failed outside of its run", trial.number)
                error = RunError(f"{type(error).__name__}: {error}")
            trial.end_run("failed", error)
            # The next trial gets new engines, because after an error a GPU may be unusable, or its memory may
            # still be allocated.
            cluster.stop()

    def _write_table(self) -> None:
        """Write the trials' table as it is now, so that other programs can read it at any time."""
        try:
            with self._table_lock:
                write_whole(self.folder / TABLE, self.table().to_csv(index=False))
        except Exception as error:  # noqa: BLE001
            # The sweep goes on: the table can be written again from the trials' folders.
            is_expected = isinstance(error, OSError)
            _log.warning(
                "the table of %s could not be written: %s", self.folder.name, error, exc_info=not is_expected
            )

    def _abandon(self) -> None:
        """Stop the engines when the interpreter exits. A sweep that is resumed repeats the steps since the
        last checkpoints."""
        self._stopping.set()
        for cluster in self._clusters:
            cluster.stop()
