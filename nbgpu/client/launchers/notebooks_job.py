"""The Slurm job that the notebook itself is in: how it is, what it has, and for how long."""

from __future__ import annotations

import time
from typing import Self

from nbgpu.client.launchers.slurm import Slurm
from nbgpu.errors import ClusterError
from nbgpu.machine import slurm_job
from nbgpu.machine.slurm_job import OwnJob

_PATIENCE_S = 3.0
"""Somebody waits for the answer who can do without it."""


class NotebooksJob:
    """Asks Slurm about the job in which this process runs.

    Args:
        job: what Slurm has told this process of it.
        slurm: Slurm's programs.
    """

    def __init__(self, job: OwnJob, slurm: Slurm | None = None) -> None:
        self.number = job.number
        self.node = job.node
        self._end_s = job.end_s
        self._slurm = slurm or Slurm(patience_s=_PATIENCE_S)

    @classmethod
    def find(cls) -> Self | None:
        """The job in which this process runs; None where it is in none."""
        job = slurm_job.own_job()
        return None if job is None else cls(job)

    @classmethod
    def that_ends_this_process(cls) -> Self | None:
        """The same, where this process is on one of the job's nodes; one that salloc has started on a login
        node may outlive the job."""
        job = cls.find()
        return job if job is not None and job.node else None

    def state(self) -> str:
        """Say how the job is: "this notebook's job 7 runs on n1, n2; 3 h left"."""
        try:
            return f"this notebook's {self._slurm.state(self.number).in_words()}"
        except ClusterError as error:
            return f"this notebook is in Slurm's job {self.number}: {error}"

    def time_left_s(self) -> float | None:
        """The time until the job's limit; None if it has none or nobody knows."""
        try:
            return self._slurm.state(self.number).time_left_s
        except ClusterError:
            # As in a container without Slurm's programs.
            return None if self._end_s is None else max(0.0, self._end_s - time.time())

    def describe(self) -> str:
        """Say how the job is, and which GPUs it has on which nodes.

        Raises:
            ClusterError: Slurm does not answer.
        """
        state = self._slurm.state(self.number).in_words()
        return f"this notebook's {state}; {self._slurm.allocation(self.number).gpus_in_words}"
