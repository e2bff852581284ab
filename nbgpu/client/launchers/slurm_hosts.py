"""What the launcher that submits a Slurm job and the one that uses the notebook's own job have in common."""

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

_QUICK_PATIENCE_S = 3.0
"""For answers that are not necessary."""
_CHECK_PERIOD_S = 2.0
"""Not more often, because Slurm's controller serves all users of a site."""
_HOST_ENDED = re.compile(r"srun: error: (?:Node )?(\S+?): tasks? [\d,-]+: (.+)")
_SLURM_PORT = 6818
OPTIONS = ("python", "folder")
"""The names in `launcher_options` that are not options of sbatch, but of nbgpu."""
_NUM_LINES = 20


class SlurmHosts(Launcher):
    """Hosts that srun starts, one task on each node.

    Args:
        config: the settings of the cluster.
    """

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        options = config.options_of_launcher
        nbgpu_options = {name: str(options[name]) for name in OPTIONS if name in options}
        self._python = nbgpu_options.get("python", sys.executable)
        self._folder = shared_folder.new_folder(nbgpu_options, ".nbgpu-job-")
        self._slurm = Slurm()
        self._quick_slurm = Slurm(patience_s=_QUICK_PATIENCE_S)
        self._state: JobState | None = None
        """The state of the job at the last look."""
        self._checked_mono_s = 0.0

    @property
    def _output(self) -> Path:
        """The file to which Slurm writes the output of the hosts."""
        return self._folder / "job.log"

    def _host_command(self, removal: str) -> list[str]:
        """The command that runs the host program on a node.

        Args:
            removal: the option that says when the program removes the job's folder; see
                nbgpu/engine/process/host.py.
        """
        join_file = str(self._folder / "join.json")
        return [self._python, "-P", "-m", "nbgpu.engine.process.host", join_file, removal]

    def _interface_towards(self, addresses: Sequence[str]) -> tuple[str, str]:
        """The interface on the route to the first of these nodes whose name resolves here; if none does, the
        one that is chosen without a destination."""
        for address in addresses:
            try:
                return interfaces.towards(socket.gethostbyname(address), _SLURM_PORT)
            except OSError:
                continue
        return interfaces.address_of("auto")

    def _was_checked_recently(self) -> bool:
        """Whether the last look at the job is recent enough."""
        return time.monotonic() - self._checked_mono_s < _CHECK_PERIOD_S

    def is_over(self) -> bool:
        """Whether the job has ended, or is about to."""
        if not self._was_checked_recently():
            try:
                self._look(self._quick_slurm)
            except ClusterError:
                return False  # the next call asks again
        return self._state is not None and self._means_the_end(self._state)

    @abstractmethod
    def _means_the_end(self, state: JobState) -> bool:
        """Whether no lost host can come back in this state of the job."""

    def _look(self, slurm: Slurm) -> JobState:
        """Ask Slurm for the state of the job, and store it.

        Raises:
            ClusterError: Slurm does not answer.
        """
        self._state = slurm.state(self._job_number)
        self._checked_mono_s = time.monotonic()
        return self._state

    @property
    def _job_number(self) -> str:
        """The number of the job that has the nodes."""
        return self.job

    def record(self) -> dict[str, Any]:
        """Return the folder that the hosts share with the notebook."""
        return {"folder": str(self._folder)}

    def take_over(self, job: str, record: Mapping[str, Any]) -> None:
        """Take over the job, or the steps, that another process has started."""
        self.job = job
        self._folder = Path(record.get("folder", self._folder))

    def _require_hosts(self) -> None:
        """Raise ClusterError if a host program has ended, which srun reports in the output."""
        if ended := _HOST_ENDED.findall(self._log()):
            hosts = "; ".join(f"{host} did not join ({how})" for host, how in ended)
            raise ClusterError(f"{hosts}. {self.why_late()}")

    def _log(self) -> str:
        """The output of the hosts so far."""
        try:
            return self._output.read_text(errors="replace")
        except OSError:
            return ""

    def why_late(self) -> str:
        """The last lines of the hosts' output."""
        lines = self._log().strip().splitlines()[-_NUM_LINES:]
        if not lines:
            return (
                f"The job has written nothing to {self._output}. Where nodes do not see that folder, "
                "launcher_options={'folder': ...} names another place"
            )
        return "\n".join(["The job's output ends with:", *lines])

    def state(self) -> str:
        """Describe the state of the job: 'job 7 runs on n1, n2; 3 h left'."""
        try:
            return self._quick_slurm.state(self._job_number).in_words()
        except ClusterError as error:
            return str(error)

    def time_left_s(self) -> float | None:
        """The seconds until the job's time limit; None if it has none.

        Raises:
            ClusterError: Slurm does not answer.
        """
        return self._quick_slurm.state(self._job_number).time_left_s
