"""The Slurm job in which the notebook itself runs: its state, its nodes and GPUs, and its time limit."""

from __future__ import annotations

import time
from typing import Self

from nbgpu.client.launchers.slurm import Slurm
from nbgpu.errors import ClusterError
from nbgpu.machine import slurm_job
from nbgpu.machine.slurm_job import OwnJob

_PATIENCE_S = 3.0
"""The answers are not necessary, and somebody waits for them."""


class NotebooksJob:
    """Asks Slurm about the job in which this process runs.

    Args:
        job: the job, from the variables that Slurm has set for this process.
        slurm: Slurm's programs; None for those of this host, with a short patience.
    """

    def __init__(self, job: OwnJob, slurm: Slurm | None = None) -> None:
        self.number = job.number
        self.node = job.node
        self._end_s = job.end_s
        self._slurm = slurm or Slurm(patience_s=_PATIENCE_S)

    @classmethod
    def find(cls) -> Self | None:
        """Return the job in which this process runs; None if it does not run in a job."""
        job = slurm_job.own_job()
        return None if job is None else cls(job)

    @classmethod
    def that_ends_this_process(cls) -> Self | None:
        """Like `find`, but return a job only if this process runs on one of its nodes, where Slurm ends it
        with the job. A process that salloc has started runs on a login node, and may outlive the job."""
        job = cls.find()
        return job if job is not None and job.node else None

    def state(self) -> str:
        """Describe the state of the job: "this notebook's job 7 runs on n1, n2; 3 h left"."""
        try:
            return f"this notebook's {self._slurm.state(self.number).in_words()}"
        except ClusterError as error:
            return f"this notebook is in Slurm's job {self.number}: {error}"

    def time_left_s(self) -> float | None:
        """The seconds until the job's time limit; None if it has none or it is not known."""
        try:
            return self._slurm.state(self.number).time_left_s
        except ClusterError:
            # For example in a container without Slurm's programs: use the variable that Slurm has set.
            return None if self._end_s is None else max(0.0, self._end_s - time.time())

    def describe(self) -> str:
        """Describe the state of the job, and its GPUs on each node.

        Raises:
            ClusterError: Slurm does not answer.
        """
        state = self._slurm.state(self.number).in_words()
        return f"this notebook's {state}; {self._slurm.allocation(self.number).gpus_in_words}"
