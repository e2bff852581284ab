"""Stops the run and saves the variables shortly before a job's time limit ends the ranks or the notebook."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress

from nbgpu.client.engines.host_pool import HostPool
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.client.launchers.notebooks_job import NotebooksJob
from nbgpu.client.runs.manager import RunManager
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.release import TimeLimitWatch, tell_in_next_cell
from nbgpu.client.variables.store import VariableStore
from nbgpu.config import ClusterConfig
from nbgpu.config.launchers import LAUNCHERS
from nbgpu.errors import ClusterError, ConfigError, NbgpuError

_log = logging.getLogger("nbgpu.cluster")


def require_loop(config: ClusterConfig) -> None:
    """Raise ConfigError if variables are to be saved before a time limit and there is no event loop on which
    to save them, as outside of a notebook."""
    if config.save_before_time_limit and ipython_shell.event_loop() is None:
        raise ConfigError(
            "save_before_time_limit works in a notebook, between two cells; in a program, call cluster.save() yourself"
        )


def may_come(launcher: str) -> bool:
    """Whether the time limit of a job may end the ranks or this process."""
    return LAUNCHERS[launcher].IS_JOB or NotebooksJob.that_ends_this_process() is not None


def require_limit(config: ClusterConfig) -> None:
    """Raise ConfigError if variables are to be saved before the end of a job, and there is no job."""
    if config.save_before_time_limit and not may_come(config.launcher):
        raise ConfigError(
            f"save_before_time_limit={config.save_before_time_limit!r} counts with launcher='slurm', or in a notebook that is on "
            f"a node of a Slurm job. This one is on none (by SLURM_JOB_ID and SLURMD_NODENAME), and with launcher="
            f"{config.launcher!r} nothing ends the ranks at a known time. Leave it out"
        )


def job_state(pool: HostPool) -> str:
    """Return the state of the jobs that have the ranks or the notebook; empty if there is no job."""
    return "\n".join(filter(None, [job.state() for job in pool.jobs()]))


def watch_over(state: ClusterState, runs: RunManager, variables: VariableStore) -> TimeLimitWatch | None:
    """Watch the time limits of the jobs that run the ranks or the notebook. Shortly before the first of
    them, stop the cluster's run and save its variables.

    Returns:
        The watch; None if there is no job.
    """
    jobs = state.pool.jobs()
    if not jobs:
        return None

    ends_mono_s: dict[int, float] = {}

    def time_left_s() -> float | None:
        for number, job in enumerate(jobs):
            # A job that does not answer now ends when it said last.
            with suppress(ClusterError):
                left_s = job.time_left_s()
                ends_mono_s[number] = math.inf if left_s is None else time.monotonic() + left_s
        end_mono_s = min(ends_mono_s.values(), default=math.inf)
        return None if end_mono_s == math.inf else max(0.0, end_mono_s - time.monotonic())

    def warn(reason: str) -> None:
        message = reason
        run = runs.run
        if run is not None and not run.over:
            try:
                run.stop(f"{reason}: stopped after this step, with a checkpoint")
                message = f"{reason}: {run.folder.name} stops, and writes a checkpoint first"
            except NbgpuError as error:
                message = f"{reason}, and {run.folder.name} could not be stopped: {error}"
        _log.warning("%s", message)
        tell_in_next_cell(message[0].upper() + message[1:])

    def can_save() -> bool:
        return runs.run is None or runs.run.over

    def save(reason: str) -> None:
        if state.running and state.config.save_before_time_limit:
            _log.warning("%s", variables.save_before_the_end(state.config.save_before_time_limit, reason))

    return TimeLimitWatch(time_left_s, warn, can_save, save)
