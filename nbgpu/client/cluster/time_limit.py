"""Acts before hosts are taken away, as at a job's time limit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbgpu.client.cluster.release import tell_in_next_cell
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.launchers.notebooks_job import NotebooksJob
from nbgpu.client.launchers.slurm_hosts import SlurmHosts
from nbgpu.client.launchers.slurm_steps import StepLauncher
from nbgpu.config import ClusterConfig
from nbgpu.config.launchers import LAUNCHERS
from nbgpu.errors import ConfigError, NbgpuError
from nbgpu.text.durations import duration

if TYPE_CHECKING:
    from nbgpu.client.cluster.cluster import Cluster

_log = logging.getLogger("nbgpu.cluster")

WARNING_BEFORE_END_S = 120.0
"""Enough for a checkpoint of a large model, and for the variables."""
_ASK_PERIOD_S = 60.0
_RUN_PATIENCE_S = 90.0
_RUN_LOOK_S = 0.1


def require_loop(config: ClusterConfig) -> None:
    """Raise ConfigError if variables are to be saved before the end where that cannot be done."""
    if config.save_before_time_limit and ipython_shell.event_loop() is None:
        raise ConfigError(
            "save_before_time_limit works in a notebook, between two cells. A program calls cluster.save() itself"
        )


def may_come(launcher: str) -> bool:
    """Whether a job may end ranks of this launcher, so that `save_before_time_limit` counts."""
    return LAUNCHERS[launcher].IS_JOB or NotebooksJob.that_ends_this_process() is not None


def require_limit(config: ClusterConfig) -> None:
    """Raise ConfigError if variables are to be saved before the end of a job, and there is no job."""
    if config.save_before_time_limit and not may_come(config.launcher):
        raise ConfigError(
            f"save_before_time_limit={config.save_before_time_limit!r} counts with launcher='slurm', or in a notebook that is on "
            f"a node of a Slurm job. This one is on none (by SLURM_JOB_ID and SLURMD_NODENAME), and with launcher="
            f"{config.launcher!r} nothing ends the ranks at a known time. Leave it out"
        )


def job_state(launcher: Launcher | None) -> str:
    """Say how the jobs are that have the ranks or the notebook; nothing where there is none."""
    own = None if isinstance(launcher, StepLauncher) else NotebooksJob.that_ends_this_process()
    return "\n".join(filter(None, [each.state() for each in (launcher, own) if each is not None]))


def watch_over(cluster: Cluster, launcher: Launcher | None) -> TimeLimitWatch | None:
    """Stop the cluster's run and save its variables before the hosts are taken away, or the notebook itself;
    None where no job has them.

    Args:
        cluster: the cluster.
        launcher: what has started its hosts; None where its ranks are on the notebook's.
    """
    limits: list[Callable[[], float | None]] = []
    if isinstance(launcher, SlurmHosts):
        limits.append(launcher.time_left_s)
    if not isinstance(launcher, StepLauncher) and (own := NotebooksJob.that_ends_this_process()) is not None:
        limits.append(own.time_left_s)
    if not limits:
        return None

    def time_left_s() -> float | None:
        return min((left_s for limit in limits if (left_s := limit()) is not None), default=None)

    def warn(why: str) -> None:
        told = why
        run = cluster.run
        if run is not None and not run.over:
            try:
                run.stop(f"{why}: stopped after this step, with a checkpoint")
                told = f"{why}: {run.folder.name} stops, and writes a checkpoint first"
            except NbgpuError as error:
                told = f"{why}, and {run.folder.name} could not be stopped: {error}"
        _log.warning("%s", told)
        tell_in_next_cell(told[0].upper() + told[1:])

    def can_save() -> bool:
        return cluster.run is None or cluster.run.over

    def save(why: str) -> None:
        if cluster.running and cluster.config.save_before_time_limit:
            _log.warning("%s", cluster.save_before_the_end(cluster.config.save_before_time_limit, why))

    return TimeLimitWatch(time_left_s, warn, can_save, save)


class TimeLimitWatch:
    """Asks on a thread of its own for how long the hosts are there, and acts once when that is not long.

    Args:
        time_left_s: a function that returns the time left, or None if there is no limit or nobody knows.
        warn: is called on the thread, with the time left as the beginning of a sentence.
        can_save: a function that returns whether `save` may be called.
        save: is called after that, on the notebook's event loop, and so never within another call of the
            notebook's. Where there is no loop it is not called.
    """

    def __init__(
        self,
        time_left_s: Callable[[], float | None],
        warn: Callable[[str], None],
        can_save: Callable[[], bool],
        save: Callable[[str], None],
    ) -> None:
        self._time_left_s = time_left_s
        self._warn = warn
        self._can_save = can_save
        self._save = save
        self._closing = threading.Event()
        self._end_mono_s: float | None = None
        self._loop = ipython_shell.event_loop()
        self._thread = threading.Thread(target=self._watch, name="nbgpu-time-limit", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float | None:
        """The time until the hosts are taken away, as said within the last minute; None if there is no
        limit or nobody knows."""
        return None if self._end_mono_s is None else max(0.0, self._end_mono_s - time.monotonic())

    def close(self) -> None:
        """End the watch; later calls do nothing."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while (left_s := self._look()) is None or left_s > WARNING_BEFORE_END_S:
            pause_s = _ASK_PERIOD_S if left_s is None else min(_ASK_PERIOD_S, left_s - WARNING_BEFORE_END_S)
            if self._closing.wait(pause_s):
                return
        why = f"the job has {duration(left_s)} left"
        self._warn(why)
        give_up_s = time.monotonic() + _RUN_PATIENCE_S
        while not self._can_save() and time.monotonic() < give_up_s:
            if self._closing.wait(_RUN_LOOK_S):
                return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._save_if_open, why)

    def _look(self) -> float | None:
        left_s = self._time_left_s()
        self._end_mono_s = None if left_s is None else time.monotonic() + left_s
        return left_s

    def _save_if_open(self, why: str) -> None:
        if not self._closing.is_set():
            self._save(why)
