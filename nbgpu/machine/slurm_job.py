"""The Slurm job in which this process runs, and the GPUs that it was given, by the variables that Slurm sets.

A notebook is in a job where a site's JupyterHub or Open OnDemand has started it there, or where somebody has
typed `salloc` first.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

NEW_JOB = "new_job"
"""The name in `launcher_options` that asks for a job of its own all the same."""
_PATIENCE_S = 5.0
"""The longest time for which scontrol may hold up the choice of GPUs."""
_OF_SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""The first counts in a step, which may have fewer GPUs than its job."""


@dataclass(frozen=True)
class OwnJob:
    """The job of this process."""

    number: str
    num_nodes: int
    node: str = ""
    """Slurm's name of the node on which this process runs; empty where it is on none of the job's, as with
    salloc on a login node."""
    gpus_per_node: int | None = None
    """The number of GPUs of this node that the job has; None if Slurm has not told this process."""
    end_s: float | None = None
    """When its time is up, in seconds since the epoch, as it was when the job began; None where this Slurm
    does not say so."""


def own_job(variables: Mapping[str, str] | None = None) -> OwnJob | None:
    """The job in which this process runs; None where it is in none.

    Args:
        variables: of the environment; None for this process's.
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
    """Which of the host's GPUs this process may use."""

    names: str
    """The GPUs in the form of `CUDA_VISIBLE_DEVICES`."""
    by: str
    """The source of the restriction, for messages: 'CUDA_VISIBLE_DEVICES=0,1'."""


def restriction(num_gpus: int) -> Restriction | None:
    """The GPUs that this process may use; None for all that the driver lists.

    CUDA obeys one variable alone, which Slurm sets with the others. Where it was lost on the way to the
    notebook, as in a step of an exclusive job, the job's GPUs are still those that Slurm names. Where Slurm
    names none, and counts GPUs on this node, they belong to other jobs.

    Args:
        num_gpus: how many the driver lists. Slurm's numbers are those of the whole node, and a site may have
            left a job the sight of its own GPUs alone.
    """
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return Restriction(names, f"CUDA_VISIBLE_DEVICES={names}")
    job = own_job()
    if not num_gpus or job is None or not job.node:
        return None
    for variable in _OF_SLURM:
        if (names := os.environ.get(variable)) is None:
            continue
        # A part of a GPU (MIG) has a name of Slurm's own.
        is_known = all(name.isdecimal() for name in names.split(","))
        is_part = num_gpus > len(names.split(","))
        return Restriction(names, f"{variable}={names}") if is_known and is_part else None
    return (
        Restriction("", f"Slurm's job {job.number}, which was given no GPU,")
        if _counts_gpus(job.node)
        else None
    )


@cache
def _counts_gpus(node: str) -> bool:
    """Whether Slurm hands out the GPUs of a node one by one. Many a site gives whole nodes."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", node],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # in a container without Slurm's programs
    return re.search(r"\sGres=(?:\S*,)?gpu:", done.stdout) is not None
