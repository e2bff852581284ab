"""Runs Slurm's programs (sbatch, scontrol, squeue, sacct, scancel, sinfo) and parses what they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from nbgpu.client.launchers.slurm_state import ACCOUNTING_FIELDS, JobState, from_accounting, from_scontrol
from nbgpu.errors import ClusterError

_SUBMIT_PATIENCE_S = 30.0
"""If the queue is full, sbatch tries again and again for longer than anybody would wait."""
_TIMED_OUT = 124
"""The exit status, as of timeout(1), that stands for a program that did not end in time."""
_SUBMITTED = re.compile(r"^(\d+)(?:;\S+)?\s*$", re.MULTILINE)
"""What sbatch prints: 'JOB', or 'JOB;CLUSTER'. A site's wrapper of sbatch may print other lines."""
_STEP_PATIENCE_S = 5.0
_STEP_LOOK_S = 0.2

_SECRETS = re.compile(r"JUPYTERHUB_.*|JUPYTER_TOKEN|JPY_API_TOKEN|IPP_CONNECTION_INFO")
"""Variables with the tokens of the notebook's server: Slurm stores a job's environment on its disk."""
_JOB_VARIABLES = re.compile(r"SLURM_(?!CONF$).*|SBATCH_.*|SRUN_.*|PMI_.*|PMIX_.*")
"""Variables of the job in which the notebook may run: srun would read them as its own options."""

_ADVICE = (
    # Slurm's words for three limits name accounts, QOS and time as well.
    (
        r"[Jj]ob violates",
        "you have too many jobs, or ask for more than you may: end some, ask for less, or try later",
    ),
    (r"[Ii]nvalid partition", "{partitions}"),
    (
        r"[Ii]nvalid account|account/partition",
        "launcher_options={{'account': ...}} names one that you may use here",
    ),
    (r"[Ii]nvalid qos|QOS", "launcher_options={{'qos': ...}} names one that you may use here"),
    (r"time limit", "launcher_options={{'time': 'HH:MM:SS'}} asks for less, as the partition allows"),
    (
        r"[Nn]ode count|More processors|node configuration",
        "ask for fewer nodes or GPUs, or another partition",
    ),
    (r"[Ii]nvalid generic resource|gres|GRES", "gpus_per_node is more than a node of the partition has"),
    (r"not available|inactive|drain", "{partitions}"),
    (
        r"temporarily unable|limit",
        "the queue takes no more of your jobs now; end some, or try later",
    ),
    (
        r"[Uu]nable to contact|Connection refused|munge",
        "Slurm itself does not answer on this host; ask the administrator",
    ),
    (r"unrecognized option|[Ii]nvalid option", "see `man sbatch` for the options of this Slurm"),
)
"""The errors with which Slurm refuses a job, as regular expressions, and what to do about each."""


@dataclass(frozen=True)
class Allocation:
    """The nodes and GPUs of a job."""

    gpus_by_node: Mapping[str, int]
    """The nodes in Slurm's order, each with the number of GPUs that the job has there."""
    gpus_are_of_job: bool = False
    """Whether the job was submitted with a number of GPUs for all nodes together (--gpus)."""

    @property
    def gpus_in_words(self) -> str:
        """The number of GPUs: '2 GPUs on each node', or 'GPUs: 2 on n1, 1 on n2'."""
        numbers = list(self.gpus_by_node.values())
        if not any(numbers):
            return "Slurm counts no GPU of it"
        if len(set(numbers)) == 1 and len(numbers) > 1:
            return f"{numbers[0]} GPU{'s' if numbers[0] > 1 else ''} on each node"
        return "GPUs: " + ", ".join(f"{number} on {node}" for node, number in self.gpus_by_node.items())

    def first_nodes(self, num_nodes: int) -> Allocation:
        """The part of the allocation on the first nodes."""
        return replace(self, gpus_by_node=dict(list(self.gpus_by_node.items())[:num_nodes]))


@dataclass(frozen=True)
class Slurm:
    """The Slurm of this host.

    Args:
        through: a command line that runs Slurm's programs somewhere else; empty to run them here.
        patience_s: the time limit of each program except sbatch, in seconds.
    """

    through: Sequence[str] = ()
    patience_s: float = 60.0

    def submit(self, script: str) -> str:
        """Submit a batch script and return the job's number.

        Raises:
            ClusterError: Slurm refuses the job, does not answer in time, or is not on this host.
        """
        done = self._run(["sbatch", "--parsable"], script, patience_s=_SUBMIT_PATIENCE_S)
        if done.returncode == _TIMED_OUT:
            raise ClusterError(
                f"Slurm did not say that it took the job: {self._with_advice(done)}. It may have taken the job all the "
                "same: `squeue --me` shows your jobs, and `scancel NUMBER` ends one"
            )
        jobs = _SUBMITTED.findall(done.stdout)
        if done.returncode or not jobs:
            raise ClusterError(f"Slurm did not take the job: {self._with_advice(done)}")
        return str(jobs[-1])

    def state(self, job: str) -> JobState:
        """Return the state of a job.

        Raises:
            ClusterError: Slurm does not answer.
        """
        if line := self._job_line(job):
            node_list = re.search(r"\sNodeList=(\S+)", line)
            nodes = [] if node_list is None or node_list[1] == "(null)" else self._expanded(node_list[1])
            return from_scontrol(line, nodes)
        return self._accounted_state(job) or JobState(job, "")

    def allocation(self, job: str) -> Allocation:
        """Return the nodes and GPUs of a running job; no nodes if Slurm does not know the job any more.

        Raises:
            ClusterError: Slurm does not answer.
        """
        line = self._job_line(job)
        gpus: dict[str, int] = {}
        for nodes, resources in re.findall(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", line):
            # Several types are separated by commas: gpu:a100:2(IDX:0-1),gpu:1(IDX:2)
            counts = re.findall(r"(?:^|,)gpu:(?:[^,:(]+:)?(\d+)", resources)
            gpus |= dict.fromkeys(self._expanded(nodes), sum(map(int, counts)))
        return Allocation(gpus, re.search(r"\sTresPerJob=\S*gpu", line) is not None)

    def _job_line(self, job: str) -> str:
        """The line that `scontrol show job` prints for a job; empty if Slurm does not know it any more."""
        done = self._run(["scontrol", "show", "job", "--details", "--oneliner", job])
        # For the first job of an array scontrol prints all jobs of the array.
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"JobId={job} ")]
        if lines and not done.returncode:
            return lines[0]
        if "Invalid job id" not in done.stderr:
            raise ClusterError(f"Slurm does not say how job {job} is: {self._with_advice(done)}")
        return ""

    def steps(self, job: str, name: str) -> list[str]:
        """The numbers of those steps of a job that have this name, such as '7.1'.

        Raises:
            ClusterError: Slurm does not answer.
        """
        done = self._run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"])
        if done.returncode:
            raise ClusterError(f"Slurm does not say which steps job {job} has: {self._with_advice(done)}")
        rows = [line.split() for line in done.stdout.splitlines()]
        return [row[0] for row in rows if row[1:] == [name]]

    def cancel(self, job: str) -> None:
        """End a job, whether it waits or runs, or steps of a job; do nothing if they have ended.

        Args:
            job: the number of the job, or the numbers of steps, separated by spaces: '7.1 7.2'.

        Raises:
            ClusterError: Slurm does not cancel them.
        """
        numbers = job.split()
        if any("." in number for number in numbers):
            # Without the signal Slurm kills the tasks of a step at once, and their files would stay.
            self._scancel(["--signal=TERM", *numbers])
            self._wait_for_end(numbers)
        self._scancel(numbers)

    def _scancel(self, arguments: Sequence[str]) -> None:
        done = self._run(["scancel", *arguments])
        if done.returncode and "Invalid job id" not in done.stderr and "already" not in done.stderr:
            raise ClusterError(f"Slurm did not cancel job {arguments[-1]}: {self._with_advice(done)}")

    def _wait_for_end(self, steps: Sequence[str]) -> None:
        """Wait some seconds for the end of steps of one job."""
        job = steps[0].partition(".")[0]
        give_up_mono_s = time.monotonic() + _STEP_PATIENCE_S
        while time.monotonic() < give_up_mono_s:
            done = self._run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"])
            if done.returncode or not set(done.stdout.split()) & set(steps):
                return
            time.sleep(_STEP_LOOK_S)

    def partitions(self) -> list[str]:
        """The names of the partitions that accept jobs."""
        done = self._run(["sinfo", "--noheader", "--format=%R %a"])
        return [line.split()[0] for line in done.stdout.splitlines() if line.split()[1:] == ["up"]]

    def node_addresses(self, partition: str = "", nodes: Sequence[str] = ()) -> list[str]:
        """The host names or addresses of Slurm's nodes.

        Args:
            partition: take only the nodes of this partition; empty for all.
            nodes: take only these nodes; empty for all.
        """
        filters = [f"--partition={partition}"] if partition else []
        filters += [f"--nodes={','.join(nodes)}"] if nodes else []
        return self._run(["sinfo", "--noheader", "--Node", "--format=%o", *filters]).stdout.split()

    def _accounted_state(self, job: str) -> JobState | None:
        """The state of a job in Slurm's accounting; None if the site has no accounting, or no such job."""
        options = ["--parsable2", "--noheader", "--allocations", f"--format={ACCOUNTING_FIELDS}"]
        done = self._run(["sacct", *options, f"--jobs={job}"])
        lines = done.stdout.strip().splitlines()
        return from_accounting(lines[-1]) if lines and not done.returncode else None

    def _expanded(self, nodes: str) -> list[str]:
        """The names of the nodes in Slurm's short form, such as 'n[1-3]'."""
        if not re.search(r"[\[,]", nodes):
            return [nodes]
        done = self._run(["scontrol", "show", "hostnames", nodes])
        return done.stdout.split() or [nodes]

    def _run(
        self, command: Sequence[str], stdin: str = "", patience_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs. If it does not end in time, its status is `_TIMED_OUT`.

        Raises:
            ClusterError: the program is not on this host.
        """
        if not self.through and shutil.which(command[0]) is None:
            raise ClusterError(
                f"there is no {command[0]} on this host. launcher='slurm' works where Slurm's programs are, such as "
                "on a cluster's login node, and not in a container without them"
            )
        arguments = [*self.through, *command]
        patience_s = patience_s or self.patience_s
        try:
            return subprocess.run(
                arguments,
                input=stdin,
                capture_output=True,
                text=True,
                check=False,
                timeout=patience_s,
                env=environment(os.environ),
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            # Its output is bytes even if the program was run with text=True.
            output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
            message = f"{output.strip()}\n{command[0]} did not end within {patience_s:.0f} s".strip()
            return subprocess.CompletedProcess(arguments, _TIMED_OUT, "", message)

    def _with_advice(self, done: subprocess.CompletedProcess[str]) -> str:
        """The error output of a program in one line, and what to do about it if that is known."""
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
        output = "; ".join(dict.fromkeys(filter(None, lines)))
        output = output or f"{done.args[len(self.through)]} ended with status {done.returncode} and no word"
        for pattern, advice in _ADVICE:
            if re.search(pattern, output):
                partitions = "launcher_options={'partition': ...} names another one"
                if "{partitions}" in advice:
                    with suppress(ClusterError):  # such as where there is no sinfo
                        if names := self.partitions():
                            partitions = (
                                f"launcher_options={{'partition': ...}} names one of {', '.join(names)}"
                            )
                return f"{output}. {advice.format(partitions=partitions)}"
        return output


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment for a job or a step: these variables without the tokens of the notebook's server, and
    without those of the job in which the notebook may run."""
    return {
        name: value
        for name, value in variables.items()
        if not _SECRETS.fullmatch(name) and not _JOB_VARIABLES.fullmatch(name)
    }
