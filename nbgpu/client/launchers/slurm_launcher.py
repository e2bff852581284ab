"""The hosts of a cluster with `launcher="slurm"`: one job, each node of which becomes a host."""

from __future__ import annotations

import re
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbgpu.client.launchers import shared_folder
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.launchers.slurm import Slurm
from nbgpu.client.launchers.slurm_script import SlurmRequest, batch_script
from nbgpu.client.launchers.slurm_state import JobState
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.machine import interfaces
from nbgpu.machine.signals import uninterrupted

_LOOK_PATIENCE_S = 3.0
"""Where somebody waits for the answer who can do without it."""
_CHECK_PERIOD_S = 2.0
"""A site's controller answers many people."""
_ENDING_PATIENCE_S = 3.0
"""Slurm says why a job ends only once all of its nodes are free."""
_ENDING_LOOK_S = 0.1
_HOST_ENDED = re.compile(r"srun: error: (?:Node )?(\S+?): tasks? [\d,-]+: (.+)")
_SLURM_PORT = 6818
_NUM_LINES = 20
_OWN_OPTIONS = ("python", "folder")
"""Names in `launcher_options` that are nbgpu's own, and none of sbatch."""


class SlurmLauncher(Launcher):
    """Submits the job that the settings ask for.

    Args:
        config: the settings of the cluster.
        tell: a function that shows a line to the person who waits for the start.

    Raises:
        ConfigError: an option is not one of sbatch, or is not the user's to give.
    """

    def __init__(self, config: ClusterConfig, tell: Callable[[str], None]) -> None:
        super().__init__(config, tell)
        options = dict(config.options_of_launcher)
        own = {name: str(options.pop(name)) for name in _OWN_OPTIONS if name in options}
        self._python = own.get("python", sys.executable)
        self._folder = shared_folder.new_folder(own, ".nbgpu-job-")
        self._may_be_requeued = bool(options.get("requeue"))
        if self._may_be_requeued and config.on_host_lost != "wait":
            raise ConfigError(
                "launcher_options: 'requeue' needs on_host_lost='wait', because a job that is requeued loses all of its "
                "hosts at once, and the cluster has to wait for them"
            )
        self._partition = options.get("partition", options.get("p", ""))
        self._request = SlurmRequest(
            config.nodes,
            "nbgpu",
            self._folder / "job.log",
            gpus_per_node=None if config.gpus == "none" else config.gpus_per_node,
            options=options,
            setup=config.setup.splitlines(),
            outlives_nodes=config.on_host_lost != "stop",
        )
        self._script()  # refuses options that are not the user's to give
        self._slurm = Slurm()
        self._quick_slurm = Slurm(patience_s=_LOOK_PATIENCE_S)
        self._state: JobState | None = None
        self._checked_mono_s = 0.0
        self._said = ""

    def _script(self) -> str:
        join_file = str(self._folder / "join.json")
        removal = "--remove-folder-unless-signalled" if self._may_be_requeued else "--remove-folder"
        command = [self._python, "-P", "-m", "nbgpu.engine.process.host", join_file, removal]
        return batch_script(self._request, command)

    def listen_at(self) -> tuple[str, str]:
        """Return the interface that the settings name, or else that which leads to Slurm's nodes."""
        if self._config.interface != "auto":
            return super().listen_at()
        for address in self._slurm.node_addresses(str(self._partition)):
            try:
                return interfaces.towards(socket.gethostbyname(address), _SLURM_PORT)
            except OSError:
                continue
        return interfaces.address_of("auto")

    def start(self, join_file: Path, interface: str) -> None:
        """Submit the job."""
        shared_folder.make(self._folder, join_file)
        with uninterrupted():
            self.job = self._slurm.submit(self._script())
        self._say(f"job {self.job} is submitted")

    def _say(self, words: str) -> None:
        if words != self._said:
            self._said = words
            self._tell(words)

    def check(self) -> None:
        """Show why the job waits; raise ClusterError if it is over or a host's program has ended."""
        if time.monotonic() - self._checked_mono_s < _CHECK_PERIOD_S:
            return
        self._state = state = self._slurm.state(self.job)
        self._checked_mono_s = time.monotonic()
        if state.phase == "waiting" and state.reason not in ("", "None"):
            # How long it is until the expected start would be another line each time.
            self._say(re.sub(r", in [^,]+$", "", state.in_words()))
        if state.phase in ("ended", "unknown"):
            raise ClusterError(f"{state.in_words()}. {self.why_late()}")
        if ended := _HOST_ENDED.findall(self._log()):
            hosts = "; ".join(f"{host} did not join ({how})" for host, how in ended)
            raise ClusterError(f"{hosts}. {self.why_late()}")

    def is_waiting(self) -> bool:
        """Whether the job has not begun."""
        return self._state is None or self._state.phase == "waiting"

    def _log(self) -> str:
        try:
            return self._request.output.read_text(errors="replace")
        except OSError:
            return ""

    def why_late(self) -> str:
        """The end of the job's output."""
        last = self._log().strip().splitlines()[-_NUM_LINES:]
        if not last:
            return (
                f"The job has written nothing to {self._request.output}. Where nodes do not see that folder, "
                "launcher_options={'folder': ...} names another place"
            )
        return "\n".join(["The job's output ends with:", *last])

    def joined(self) -> None:
        """Show where the job runs, and until when."""
        self._state = self._slurm.state(self.job)
        self._say(self._state.in_words())

    def is_over(self) -> bool:
        """Whether the job has ended, or is about to."""
        if time.monotonic() - self._checked_mono_s > _CHECK_PERIOD_S:
            try:
                self._state = self._quick_slurm.state(self.job)
            except ClusterError:
                return False  # it is asked again
            self._checked_mono_s = time.monotonic()
        state = self._state
        if state is None:
            return False
        # A job that is requeued is COMPLETING, too, before it waits again.
        is_ending = state.state == "COMPLETING" and not self._may_be_requeued
        return is_ending or state.phase in ("ended", "unknown")

    def obstacle(self) -> str:
        """Say that the job waits to start again, and why."""
        if self._state is None or self._state.phase != "waiting":
            return ""
        words = self._state.in_words()
        return words[0].upper() + words[1:]

    def when_lost(self) -> str:
        """Say what has become of the job, and that there can be another one. Where the job is ending this
        waits for a moment, until Slurm says why it has ended."""
        give_up_mono_s = time.monotonic() + _ENDING_PATIENCE_S
        while self._is_ending() and time.monotonic() < give_up_mono_s:
            time.sleep(_ENDING_LOOK_S)
        state = self.state()
        return f"{state[0].upper()}{state[1:]}. %nbgpu restart submits another job"

    def _is_ending(self) -> bool:
        try:
            return self._quick_slurm.state(self.job).state == "COMPLETING"
        except ClusterError:
            return False  # what is said of it next names the reason

    def state(self) -> str:
        """Say how the job is: 'job 7 runs on n1, n2; 3 h left'."""
        try:
            return self._quick_slurm.state(self.job).in_words()
        except ClusterError as error:
            return str(error)

    def time_left_s(self) -> float | None:
        """The time until the job's limit; None if it has none."""
        try:
            return self._quick_slurm.state(self.job).time_left_s
        except ClusterError:
            return None  # it is asked again

    def record(self) -> dict[str, Any]:
        """Return the job's folder."""
        return {"folder": str(self._folder)}

    def take_over(self, job: str, record: Mapping[str, Any]) -> None:
        """Take over the job, to look at it and to cancel it."""
        self.job = job
        self._folder = Path(record.get("folder", self._folder))
        self._request = replace(self._request, output=self._folder / "job.log")

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
