"""The launcher of `launcher="slurm"`: submits one job, and each of its nodes becomes a host."""

from __future__ import annotations

import re
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbgpu.client.launchers import shared_folder
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.launchers.slurm_hosts import OPTIONS, SlurmHosts
from nbgpu.client.launchers.slurm_script import SlurmRequest, batch_script, long_name
from nbgpu.client.launchers.slurm_state import JobState
from nbgpu.client.launchers.slurm_steps import StepLauncher, refuse_what_the_job_decides
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.machine.signals import uninterrupted
from nbgpu.machine.slurm_job import NEW_JOB, OwnJob

_ENDING_PATIENCE_S = 3.0
"""Slurm reports why a job has ended only once all of its nodes are free."""
_ENDING_POLL_PERIOD_S = 0.1


class SlurmLauncher(SlurmHosts):
    """Submits the job that the settings ask for.

    Args:
        config: the settings of the cluster.

    Raises:
        ConfigError: an option is none of sbatch's, or a user cannot give it.
    """

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        all_options = config.options_of_launcher
        if all_options.get(NEW_JOB, True) is not True:
            raise ConfigError(f"launcher_options: {NEW_JOB!r} takes no value: {{{NEW_JOB!r}: True}}")
        options = {name: value for name, value in all_options.items() if name not in (*OPTIONS, NEW_JOB)}
        by_long_name = {long_name(name): value for name, value in options.items()}
        self._may_be_requeued = bool(by_long_name.get("requeue"))
        if self._may_be_requeued and config.on_host_lost != "wait":
            raise ConfigError(
                "launcher_options: 'requeue' needs on_host_lost='wait', because a job that is requeued loses all of its "
                "hosts at once, and the cluster has to wait for them"
            )
        self._partition = by_long_name.get("partition", "")
        self._request = SlurmRequest(
            config.num_hosts,
            "nbgpu",
            self._output,
            gpus_per_node=None if config.gpus == "none" else config.gpus_per_node,
            options=options,
            setup=config.setup.splitlines(),
            outlives_nodes=config.on_host_lost != "stop",
        )
        self._script()  # raises ConfigError for wrong options now, and not only at the start
        self._last_shown = ""

    @classmethod
    def create(cls, config: ClusterConfig) -> Launcher:
        """Return the launcher that uses the nodes of the notebook's job, if the notebook is in a job and the
        settings ask for no other one."""
        job = config.launcher_settings.own_job
        if job is None:
            return cls(config)
        refuse_what_the_job_decides(config, job)
        return StepLauncher(config, job)

    @classmethod
    def adopt(cls, config: ClusterConfig, record: Mapping[str, Any]) -> Launcher:
        """Return the launcher that the record tells: this process may be in another job than the hosts, or in
        none."""
        if number := record.get("own_job"):
            return StepLauncher(config, OwnJob(number, config.num_hosts))
        return cls(config)

    def _script(self) -> str:
        """The batch script of this cluster's job."""
        removal = "--remove-folder-unless-signalled" if self._may_be_requeued else "--remove-folder"
        return batch_script(self._request, self._host_command(removal))

    def listen_at(self) -> tuple[str, str]:
        """Return the interface that the settings name, or else the one on the route to Slurm's nodes."""
        if self._config.interface != "auto":
            return super().listen_at()
        return self._interface_towards(self._slurm.node_addresses(str(self._partition)))

    def start(self, join_file: Path, interface: str) -> None:
        """Submit the job."""
        shared_folder.make(self._folder, join_file)
        with uninterrupted():
            self.job = self._slurm.submit(self._script())
        self._show(f"job {self.job} is submitted")

    def _show(self, line: str) -> None:
        """Show a line to the person who waits, unless it is the same as the last one."""
        if line != self._last_shown:
            self._last_shown = line
            self.tell(line)

    def check(self) -> None:
        """Show why the job waits. Raise ClusterError if the job or a host program has ended."""
        if self._was_checked_recently():
            return
        state = self._look(self._slurm)
        if state.phase == "waiting" and state.reason not in ("", "None"):
            # Without the time until the expected start, which would make each line a new one.
            self._show(re.sub(r", in [^,]+$", "", state.in_words()))
        if state.phase in ("ended", "unknown"):
            raise ClusterError(f"{state.in_words()}. {self.why_late()}")
        self._require_hosts()

    def is_waiting(self) -> bool:
        """Whether the job has not begun."""
        return self._state is None or self._state.phase == "waiting"

    def joined(self) -> None:
        """Show on which nodes the job runs, and the time that it has left."""
        self._show(self._look(self._slurm).in_words())

    def _means_the_end(self, state: JobState) -> bool:
        # A requeued job is also COMPLETING for a while, before it waits again.
        is_ending = state.state == "COMPLETING" and not self._may_be_requeued
        return is_ending or state.phase in ("ended", "unknown")

    def obstacle(self) -> str:
        """Say that the job waits to start again, and why."""
        if self._state is None or self._state.phase != "waiting":
            return ""
        sentence = self._state.in_words()
        return sentence[0].upper() + sentence[1:]

    def when_lost(self) -> str:
        """Describe the state of the job, and how to submit another one. If the job is ending, this waits some
        seconds until Slurm reports why."""
        give_up_mono_s = time.monotonic() + _ENDING_PATIENCE_S
        while self._is_ending() and time.monotonic() < give_up_mono_s:
            time.sleep(_ENDING_POLL_PERIOD_S)
        state = self.state()
        return f"{state[0].upper()}{state[1:]}. %nbgpu restart submits another job"

    def _is_ending(self) -> bool:
        """Whether the job is ending at this moment."""
        try:
            return self._quick_slurm.state(self.job).state == "COMPLETING"
        except ClusterError:
            return False  # `state`, which is called next, reports the error

    @uninterrupted()
    def end(self) -> None:
        """Cancel the job, and remove its folder."""
        try:
            if self.job:
                self._slurm.cancel(self.job)
        except ClusterError as error:
            warnings.warn(f"{error}. The hosts end by themselves, and the job with them", stacklevel=3)
        self.job = ""
        shutil.rmtree(self._folder, ignore_errors=True)
