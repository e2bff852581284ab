"""The Slurm job in which this process runs, and its GPUs, according to the environment variables of Slurm.

A notebook runs in a job if a site's JupyterHub or Open OnDemand has started it in one, or if it was started
from `salloc`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

NEW_JOB = "new_job"
"""The name in `launcher_options` that requests a new job although the notebook already runs in one."""
_SCONTROL_TIMEOUT_S = 5.0
_GPU_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""The variables with the GPUs of this node. A step, for which the first is set, may have fewer than its
job."""


@dataclass(frozen=True)
class OwnJob:
    """The job of this process."""

    number: str
    num_nodes: int
    node: str = ""
    """Slurm's name of the node on which this process runs; empty if it does not run on a node of the job, as
    with salloc on a login node."""
    gpus_per_node: int | None = None
    """The number of GPUs that the job has on this node; None if Slurm does not report it."""
    end_s: float | None = None
    """The job's time limit in seconds since the epoch, as it was when the job began; None if this version of
    Slurm does not report it."""


def own_job(variables: Mapping[str, str] | None = None) -> OwnJob | None:
    """Return the job in which this process runs; None if it runs in no job.

    Args:
        variables: the environment; None for this process's environment.
    """
    variables = os.environ if variables is None else variables
    number = variables.get("SLURM_JOB_ID", "")
    if not number.isdecimal():
        return None
    return OwnJob(
        number,
        # Inside a step SLURM_NNODES counts the step's nodes, not the job's.
        _number(variables, "SLURM_JOB_NUM_NODES") or _number(variables, "SLURM_NNODES") or 1,
        variables.get("SLURMD_NODENAME", ""),
        _number(variables, "SLURM_GPUS_ON_NODE"),
        _number(variables, "SLURM_JOB_END_TIME"),
    )


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True)
class Restriction:
    """The GPUs of the host to which this process is restricted."""

    names: str
    """The GPUs in the form of `CUDA_VISIBLE_DEVICES`."""
    by: str
    """The source of the restriction, for messages: 'CUDA_VISIBLE_DEVICES=0,1'."""


def restriction(num_gpus: int) -> Restriction | None:
    """Return the GPUs that this process may use; None for all GPUs that the driver lists.

    CUDA obeys only `CUDA_VISIBLE_DEVICES`, which Slurm normally sets. If that variable was lost on the way to
    the notebook, as in a step of an exclusive job, Slurm's own variables name the job's GPUs. If Slurm names
    no GPUs but allocates the GPUs of this node, they belong to other jobs.

    Args:
        num_gpus: the number of GPUs that the driver lists. Slurm's GPU numbers refer to the whole node, so
            they are ignored if the driver lists no more GPUs than the job has.
    """
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return Restriction(names, f"CUDA_VISIBLE_DEVICES={names}")
    job = own_job()
    if not num_gpus or job is None or not job.node:
        return None
    for variable in _GPU_VARIABLES:
        if (names := os.environ.get(variable)) is not None:
            # Slurm's names of parts of a GPU (MIG) are not numbers, and not known to CUDA.
            are_numbers = all(name.isdecimal() for name in names.split(","))
            is_restricted = are_numbers and num_gpus > len(names.split(","))
            return Restriction(names, f"{variable}={names}") if is_restricted else None
    if _allocates_gpus(job.node):
        return Restriction("", f"Slurm's job {job.number}, which was given no GPU,")
    return None


@cache
def _allocates_gpus(node: str) -> bool:
    """Return whether Slurm allocates the GPUs of a node individually. Many sites allocate whole nodes."""
    try:
        result = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", node],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SCONTROL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # a container may lack Slurm's programs
    return re.search(r"\sGres=(?:\S*,)?gpu:", result.stdout) is not None
