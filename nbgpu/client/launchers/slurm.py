"""Slurm's programs: a job is submitted, looked at and cancelled, and what Slurm says is handed on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbgpu.client.launchers.slurm_state import ACCOUNTING_FIELDS, JobState, from_accounting, from_scontrol
from nbgpu.errors import ClusterError

_SUBMIT_PATIENCE_S = 30.0
"""Where the queue is full, sbatch tries again and again."""
_TIMED_OUT = 124
"""The exit status, as timeout(1) has it, that stands for a program that did not end in time."""
_SUBMITTED = re.compile(r"^(\d+)(?:;\S+)?\s*$", re.MULTILINE)
"""What sbatch prints: 'JOB', or 'JOB;CLUSTER'. A site's wrapper of sbatch may print other lines."""
_STEP_PATIENCE_S = 5.0
_STEP_LOOK_S = 0.2

_STAYS = re.compile(r"JUPYTERHUB_.*|JUPYTER_TOKEN|JPY_API_TOKEN|IPP_CONNECTION_INFO")
"""Variables of the notebook's server that hold its keys. Slurm keeps a job's environment on its disk."""
_OF_ANOTHER_JOB = re.compile(r"SLURM_(?!CONF$).*|SBATCH_.*|SRUN_.*|PMI_.*|PMIX_.*")
"""A notebook may run in a job itself, and srun would take that job's variables for its own settings."""

_ADVICE = (
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
        r"temporarily unable|[Jj]ob violates|limit",
        "the queue takes no more of your jobs now; end some, or try later",
    ),
    (
        r"[Uu]nable to contact|Connection refused|munge",
        "Slurm itself does not answer on this host; ask the administrator",
    ),
    (r"unrecognized option|[Ii]nvalid option", "see `man sbatch` for the options of this Slurm"),
)
"""What Slurm says when it refuses a job, and what to do then."""


@dataclass(frozen=True)
class Allocation:
    """What a job has."""

    gpus_by_node: Mapping[str, int]
    """Its nodes in Slurm's order, each with the number of its GPUs that the job has."""
    gpus_are_of_job: bool = False
    """Whether the job was asked for with a number of GPUs for all nodes together (--gpus)."""

    @property
    def gpus_in_words(self) -> str:
        """The GPUs by node: '2 GPUs on each node', or 'GPUs: 2 on n1, 1 on n2'."""
        numbers = list(self.gpus_by_node.values())
        if not any(numbers):
            return "Slurm counts no GPU of it"
        if len(set(numbers)) == 1 and len(numbers) > 1:
            return f"{numbers[0]} GPU{'s' if numbers[0] > 1 else ''} on each node"
        return "GPUs: " + ", ".join(f"{number} on {node}" for node, number in self.gpus_by_node.items())

    def of(self, num_nodes: int) -> Allocation:
        """The part of it that the first nodes have."""
        return replace(self, gpus_by_node=dict(list(self.gpus_by_node.items())[:num_nodes]))


@dataclass(frozen=True)
class Slurm:
    """The Slurm of this host.

    Args:
        through: the beginning of a command line by which its programs are run elsewhere; empty for here.
        patience_s: how long its programs may take, but for sbatch.
    """

    through: Sequence[str] = ()
    patience_s: float = 60.0

    def submit(self, script: str) -> str:
        """Submit a batch script and return the job's number.

        Raises:
            ClusterError: Slurm refuses it, in Slurm's words, does not answer in time, or is not here.
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
        """Return what Slurm knows of a job.

        Raises:
            ClusterError: Slurm does not answer.
        """
        if line := self._described(job):
            return from_scontrol(line, self._nodes(line))
        return self._recorded(job) or JobState(job, "")

    def allocation(self, job: str) -> Allocation:
        """Return what a job that runs has; nothing where Slurm knows the job no longer.

        Raises:
            ClusterError: Slurm does not answer.
        """
        described = self._described(job)
        gpus: dict[str, int] = {}
        for nodes, given in re.findall(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", described):
            # Several types are separated by commas: gpu:a100:2(IDX:0-1),gpu:1(IDX:2)
            counts = re.findall(r"(?:^|,)gpu:(?:[^,:(]+:)?(\d+)", given)
            gpus |= dict.fromkeys(self._named(nodes), sum(map(int, counts)))
        return Allocation(gpus, re.search(r"\sTresPerJob=\S*gpu", described) is not None)

    def _described(self, job: str) -> str:
        """The line in which scontrol describes a job; empty where Slurm knows it no longer."""
        done = self._run(["scontrol", "show", "job", "--details", "--oneliner", job])
        # The number of the first job of an array stands for all of them.
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"JobId={job} ")]
        if lines and not done.returncode:
            return lines[0]
        if "Invalid job id" not in done.stderr:
            raise ClusterError(f"Slurm does not say how job {job} is: {self._with_advice(done)}")
        return ""

    def steps(self, job: str, name: str) -> list[str]:
        """The numbers of a job's steps that have this name, such as '7.1'.

        Raises:
            ClusterError: Slurm does not answer.
        """
        done = self._run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"])
        if done.returncode:
            raise ClusterError(f"Slurm does not say which steps job {job} has: {self._with_advice(done)}")
        words = [line.split() for line in done.stdout.splitlines()]
        return [number for number, step in (each for each in words if len(each) == 2) if step == name]

    def cancel(self, job: str) -> None:
        """End a job, whether it waits or runs, or steps of a job; does nothing where they are over.

        Args:
            job: the number of the job, or of steps of one, separated by spaces: '7.1 7.2'.

        Raises:
            ClusterError: Slurm does not do it.
        """
        numbers = job.split()
        if any("." in number for number in numbers):
            # Slurm kills the tasks of a step at once, and what they have made would stay.
            self._signal(["--signal=TERM", *numbers])
            self._wait_for_end(numbers)
        self._signal(numbers)

    def _signal(self, arguments: Sequence[str]) -> None:
        done = self._run(["scancel", *arguments])
        if done.returncode and "Invalid job id" not in done.stderr and "already" not in done.stderr:
            raise ClusterError(f"Slurm did not cancel job {arguments[-1]}: {self._with_advice(done)}")

    def _wait_for_end(self, steps: Sequence[str]) -> None:
        job = steps[0].partition(".")[0]
        give_up_mono_s = time.monotonic() + _STEP_PATIENCE_S
        while time.monotonic() < give_up_mono_s:
            done = self._run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"])
            if done.returncode or not set(done.stdout.split()) & set(steps):
                return
            time.sleep(_STEP_LOOK_S)

    def partitions(self) -> list[str]:
        """The names of the partitions that take jobs."""
        done = self._run(["sinfo", "--noheader", "--format=%R %a"])
        return [line.split()[0] for line in done.stdout.splitlines() if line.split()[1:] == ["up"]]

    def node_addresses(self, partition: str = "", nodes: Sequence[str] = ()) -> list[str]:
        """The names or addresses by which Slurm reaches its nodes: of the partition's where one is named, and
        of these alone where some are."""
        of = [f"--partition={partition}"] if partition else []
        of += [f"--nodes={','.join(nodes)}"] if nodes else []
        return self._run(["sinfo", "--noheader", "--Node", "--format=%o", *of]).stdout.split()

    def _recorded(self, job: str) -> JobState | None:
        """What the accounting says; None where a site has none or it knows nothing of the job."""
        asked = [
            "sacct",
            "--parsable2",
            "--noheader",
            "--allocations",
            f"--jobs={job}",
            f"--format={ACCOUNTING_FIELDS}",
        ]
        done = self._run(asked)
        lines = done.stdout.strip().splitlines()
        return from_accounting(lines[-1]) if lines and not done.returncode else None

    def _nodes(self, line: str) -> list[str]:
        """The nodes that a line's NodeList stands for, such as 'n[1-3]'."""
        found = re.search(r"\sNodeList=(\S+)", line)
        return [] if found is None or found[1] == "(null)" else self._named(found[1])

    def _named(self, nodes: str) -> list[str]:
        if not re.search(r"[\[,]", nodes):
            return [nodes]
        done = self._run(["scontrol", "show", "hostnames", nodes])
        return done.stdout.split() or [nodes]

    def _run(
        self, command: Sequence[str], stdin: str = "", patience_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        if not self.through and shutil.which(command[0]) is None:
            raise ClusterError(
                f"there is no {command[0]} on this host. launcher='slurm' works where Slurm's programs are, such as "
                "on a cluster's login node, and not in a container without them"
            )
        words = [*self.through, *command]
        patience_s = patience_s or self.patience_s
        try:
            return subprocess.run(
                words,
                input=stdin,
                capture_output=True,
                text=True,
                check=False,
                timeout=patience_s,
                env=environment(os.environ),
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            said = (
                error.stderr.decode(errors="replace")
                if isinstance(error.stderr, bytes)
                else error.stderr or ""
            )
            late = f"{said.strip()}\n{command[0]} did not end within {patience_s:.0f} s".strip()
            return subprocess.CompletedProcess(words, _TIMED_OUT, "", late)

    def _with_advice(self, done: subprocess.CompletedProcess[str]) -> str:
        said = "; ".join(
            dict.fromkeys(line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip())
        )
        said = said or f"{done.args[len(self.through)]} ended with status {done.returncode} and no word"
        for pattern, advice in _ADVICE:
            if re.search(pattern, said):
                named = ""
                if "{partitions}" in advice:
                    named = (
                        f"launcher_options={{'partition': ...}} names one of {', '.join(self.partitions())}"
                    )
                return f"{said}. {advice.format(partitions=named)}"
        return said


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a job is submitted: without the keys of the notebook's server, and without
    those of a job that the notebook may run in."""
    unwanted = (_STAYS, _OF_ANOTHER_JOB)
    return {name: value for name, value in variables.items() if not any(p.fullmatch(name) for p in unwanted)}
