"""What the hosts of a job that was submitted for them have in common with those in the notebook's own job."""

from __future__ import annotations

import re
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbgpu.client.launchers import shared_folder
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.launchers.slurm import Slurm
from nbgpu.client.launchers.slurm_state import JobState
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError
from nbgpu.machine import interfaces

_LOOK_PATIENCE_S = 3.0
"""Where somebody waits for the answer who can do without it."""
_CHECK_PERIOD_S = 2.0
"""A site's controller answers many people."""
_HOST_ENDED = re.compile(r"srun: error: (?:Node )?(\S+?): tasks? [\d,-]+: (.+)")
_SLURM_PORT = 6818
OPTIONS = ("python", "folder")
"""Names in `launcher_options` that are nbgpu's own, and none of Slurm's."""
_NUM_LINES = 20


class SlurmHosts(Launcher):
    """Hosts that srun starts, each as a task.

    Args:
        config: the settings of the cluster.
    """

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        options = config.options_of_launcher
        own: dict[str, str] = {name: str(options[name]) for name in OPTIONS if name in options}
        self._python = own.get("python", sys.executable)
        self._folder = shared_folder.new_folder(own, ".nbgpu-job-")
        self._slurm = Slurm()
        self._quick_slurm = Slurm(patience_s=_LOOK_PATIENCE_S)
        self._state: JobState | None = None
        self._checked_mono_s = 0.0

    @property
    def _output(self) -> Path:
        """The file that Slurm writes the hosts' output to."""
        return self._folder / "job.log"

    def _host_command(self, removal: str) -> list[str]:
        """The command by which a node becomes a host.

        Args:
            removal: when it removes the job's folder; see nbgpu/engine/process/host.py.
        """
        join_file = str(self._folder / "join.json")
        return [self._python, "-P", "-m", "nbgpu.engine.process.host", join_file, removal]

    def _interface_towards(self, addresses: Sequence[str]) -> tuple[str, str]:
        """The interface that leads to the first of these nodes that is known here, or to other hosts."""
        for address in addresses:
            try:
                return interfaces.towards(socket.gethostbyname(address), _SLURM_PORT)
            except OSError:
                continue
        return interfaces.address_of("auto")

    def _is_checked(self) -> bool:
        return time.monotonic() - self._checked_mono_s < _CHECK_PERIOD_S

    def is_over(self) -> bool:
        """Whether the job has ended, or is about to."""
        if not self._is_checked():
            try:
                self._look(self._quick_slurm)
            except ClusterError:
                return False  # it is asked again
        return self._state is not None and self._means_the_end(self._state)

    @abstractmethod
    def _means_the_end(self, state: JobState) -> bool:
        """Whether no host comes back from a job in this state."""

    def _look(self, slurm: Slurm) -> JobState:
        """Ask for the state of the job, and remember it.

        Raises:
            ClusterError: Slurm does not answer.
        """
        self._state = slurm.state(self._job_number)
        self._checked_mono_s = time.monotonic()
        return self._state

    @property
    def _job_number(self) -> str:
        return self.job

    def record(self) -> dict[str, Any]:
        """Return the folder that the hosts share with the notebook."""
        return {"folder": str(self._folder)}

    def take_over(self, job: str, record: Mapping[str, Any]) -> None:
        """Take over the job or its steps, to look at them and to end them."""
        self.job = job
        self._folder = Path(record.get("folder", self._folder))

    def _require_hosts(self) -> None:
        """Raise ClusterError if a host's program has ended."""
        if ended := _HOST_ENDED.findall(self._log()):
            hosts = "; ".join(f"{host} did not join ({how})" for host, how in ended)
            raise ClusterError(f"{hosts}. {self.why_late()}")

    def _log(self) -> str:
        try:
            return self._output.read_text(errors="replace")
        except OSError:
            return ""

    def why_late(self) -> str:
        """The end of the hosts' output."""
        last = self._log().strip().splitlines()[-_NUM_LINES:]
        if not last:
            return (
                f"The job has written nothing to {self._output}. Where nodes do not see that folder, "
                "launcher_options={'folder': ...} names another place"
            )
        return "\n".join(["The job's output ends with:", *last])

    def state(self) -> str:
        """Say how the job is: 'job 7 runs on n1, n2; 3 h left'."""
        try:
            return self._quick_slurm.state(self._job_number).in_words()
        except ClusterError as error:
            return str(error)

    def time_left_s(self) -> float | None:
        """The time until the job's limit; None if it has none."""
        try:
            return self._quick_slurm.state(self._job_number).time_left_s
        except ClusterError:
            return None  # it is asked again
