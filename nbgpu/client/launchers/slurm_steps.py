"""The launcher of `launcher="slurm"` if the notebook itself is in a Slurm job: each node of that job becomes
a host, in a job step."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbgpu.client.launchers import shared_folder
from nbgpu.client.launchers.notebooks_job import NotebooksJob
from nbgpu.client.launchers.slurm import Allocation, environment
from nbgpu.client.launchers.slurm_hosts import OPTIONS, SlurmHosts
from nbgpu.client.launchers.slurm_state import JobState
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.machine.slurm_job import NEW_JOB, OwnJob
from nbgpu.text.similar import did_you_mean

_REFUSED = "srun: error: Unable to create step"
_BEGIN_PATIENCE_S = 5.0
_BEGIN_POLL_PERIOD_S = 0.1
_END_PATIENCE_S = 3.0
"""Host programs that were told to end take less than a second, and the step ends with them."""


@dataclass(frozen=True)
class StepRequest:
    """The steps to start within a job."""

    job: str
    """The number of the job."""
    name: str
    """The name of the steps, by which squeue lists them."""
    allocation: Allocation
    """The nodes that become hosts, each with the job's GPUs there."""
    setup: Sequence[str] = ()
    """Lines of shell before the hosts start, such as 'module load cuda'."""
    outlives_nodes: bool = False
    """Whether the steps go on when one of their nodes fails."""


def step_script(request: StepRequest, command: Sequence[str]) -> str:
    """Return the shell script that runs `command` once on each node, within the job."""
    steps = [
        shlex.join([*_srun(request, nodes, gpus), *command]) for nodes, gpus in _steps(request.allocation)
    ]
    run = [f"exec {steps[0]}"] if len(steps) == 1 else [*(f"{step} &" for step in steps), "wait"]
    # A login shell, because many sites define `module` only there.
    return "\n".join(["#!/bin/bash -l", *request.setup, *run]) + "\n"


def _steps(allocation: Allocation) -> list[tuple[list[str], list[str]]]:
    """Divide the nodes of a job into steps that get all of its GPUs.

    A step in an exclusive job gets no GPUs without an option, and has the same number on each of its nodes:
    so the nodes with the same number of GPUs become one step. If the job was submitted with --gpus, Slurm
    would give a step with several nodes too few GPUs: then each node is a step.

    Returns:
        The nodes of each step, and its options for GPUs.
    """
    if allocation.gpus_are_of_job:
        return [
            ([node], [f"--gpus={number}"] if number else [])
            for node, number in allocation.gpus_by_node.items()
        ]
    groups: dict[int, list[str]] = {}
    for node, number in allocation.gpus_by_node.items():
        groups.setdefault(number, []).append(node)
    return [(nodes, [f"--gres=gpu:{number}"] if number else []) for number, nodes in groups.items()]


def _srun(request: StepRequest, nodes: Sequence[str], gpus: Sequence[str]) -> list[str]:
    """The command for a step, with options in front of the program.

    Args:
        request: the steps.
        nodes: the nodes of this step.
        gpus: the options for its GPUs.
    """
    return [
        "srun",
        f"--jobid={request.job}",
        f"--job-name={request.name}",
        # Share the resources with the step in which the notebook runs: it may hold all of the job's.
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        # The ranks of a node are processes of its one task, and share all of the node's cores.
        "--cpu-bind=none",
        *gpus,
        "--input=none",
        # When one host ends, Slurm must not end the others: nbgpu decides what happens to them.
        "--kill-on-bad-exit=0",
        "--wait=0",
        *(["--no-kill"] if request.outlives_nodes else []),
    ]


def refuse_what_the_job_decides(config: ClusterConfig, job: OwnJob) -> None:
    """Check settings against the notebook's job, whose nodes and options are fixed already.

    Raises:
        ConfigError: settings do not fit the job; the message has a line for each.
    """
    another = f"launcher_options={{{NEW_JOB!r}: True}} asks for another job"
    problems = []
    for name in config.options_of_launcher:
        if name not in OPTIONS:
            meant = did_you_mean(name, [*OPTIONS, NEW_JOB])
            problems.append(
                f"launcher_options: {name!r} cannot be given, because this notebook is in job {job.number} and its nodes "
                f"are taken; {' and '.join(OPTIONS)} can.{meant} Leave it out, or {another} beside it"
            )
    if config.num_hosts > job.num_nodes:
        problems.append(
            f"nodes={config.nodes} is more than the {job.num_nodes} of job {job.number}, in which this notebook is. Leave "
            f"it out for all of them, or {another}"
        )
    if config.on_host_lost == "wait":
        problems.append(
            f"on_host_lost='wait' does not go with the nodes of job {job.number}, in which this notebook is: a job gets no "
            f"other node, and one that is requeued ends the notebook. Take 'shrink' or 'stop', or {another}"
        )
    if job.gpus_per_node is not None and _wants_more_gpus(config, job.gpus_per_node):
        problems.append(
            f"gpus_per_node={config.gpus_per_node} is more than the {job.gpus_per_node} that job {job.number} has on this "
            f"node. Leave it out for all of them, or {another}"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _wants_more_gpus(config: ClusterConfig, num_gpus: int) -> bool:
    """Whether the settings ask for more GPUs on a node than the job has there. A job with 0 GPUs may have
    them all the same: a site may give whole nodes, and not let Slurm count GPUs."""
    return config.gpus != "none" and 0 < num_gpus < (config.gpus_per_node or 0)


class StepLauncher(SlurmHosts):
    """Starts hosts in steps of the notebook's job. At the cluster's end the steps end, and the job stays.

    Args:
        config: the settings of the cluster.
        job: the notebook's job.
    """

    uses_notebooks_job = True

    def __init__(self, config: ClusterConfig, job: OwnJob) -> None:
        super().__init__(config)
        self._notebooks_job = NotebooksJob(job, self._quick_slurm)
        self._allocation = Allocation({})
        """The nodes of the job that become hosts."""
        self._shell: subprocess.Popen[bytes] | None = None
        """Runs the script that starts the steps, and ends with the last of them. None before the start, and
        if another process has started the steps."""

    @property
    def _job_number(self) -> str:
        return self._notebooks_job.number

    def listen_at(self) -> tuple[str, str]:
        """Choose the nodes of the job that become hosts. Return the interface that the settings name, or else
        the one on the route to the other nodes."""
        self._allocation = self._chosen_nodes()
        if self._config.interface != "auto":
            return super().listen_at()
        # Not the route to this node itself, which is the loopback interface.
        nodes = list(self._allocation.gpus_by_node)
        others = [node for node in nodes if node != self._notebooks_job.node]
        return self._interface_towards(self._slurm.node_addresses(nodes=others or nodes))

    def _chosen_nodes(self) -> Allocation:
        """Return the first nodes of the job, as many as the settings ask for.

        Raises:
            ClusterError: the job does not run, or Slurm does not answer.
            ConfigError: the job has fewer nodes or GPUs than the settings ask for.
        """
        state = self._look(self._slurm)
        if state.phase != "running":
            raise ClusterError(
                f"this notebook was started in job {self._job_number}, and its nodes cannot be had: {state.in_words()}. Start "
                f"the notebook in another job, or launcher_options={{{NEW_JOB!r}: True}} submits one"
            )
        allocation = self._slurm.allocation(self._job_number)
        chosen = allocation.first_nodes(self._config.num_hosts)
        num_nodes = len(allocation.gpus_by_node)
        if num_nodes < self._config.num_hosts or any(
            _wants_more_gpus(self._config, number) for number in chosen.gpus_by_node.values()
        ):
            raise ConfigError(
                f"nodes={self._config.num_hosts}, gpus_per_node={self._config.gpus_per_node} is more than job "
                f"{self._job_number} has: {num_nodes} node(s), {', '.join(allocation.gpus_by_node)}; "
                f"{allocation.gpus_in_words}"
            )
        if self._config.gpus == "none":
            return Allocation(dict.fromkeys(chosen.gpus_by_node, 0))
        return chosen

    def start(self, join_file: Path, interface: str) -> None:
        """Start the steps, and wait some seconds for their numbers, with which `end` and other processes can
        cancel them. With a long `setup` the steps begin later, and `joined` asks for the numbers again."""
        shared_folder.make(self._folder, join_file)
        script = self._folder / "steps.sh"
        script.write_text(self._script())
        with uninterrupted(), self._output.open("ab") as output:
            # In a new session, because a kept cluster outlives the kernel.
            self._shell = subprocess.Popen(
                ["bash", "-l", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(os.environ),
                start_new_session=True,
            )
        give_up_mono_s = time.monotonic() + _BEGIN_PATIENCE_S
        while not self._find_steps() and not self._all_have_ended and time.monotonic() < give_up_mono_s:
            take_interrupt()
            time.sleep(_BEGIN_POLL_PERIOD_S)
        self.tell(self._notebooks_job.state())
        if not self._all_have_ended:
            self.tell(f"hosts start on {', '.join(self._allocation.gpus_by_node)}, in steps of the job")

    def _script(self) -> str:
        """The shell script that starts the steps of this cluster."""
        request = StepRequest(
            self._job_number,
            self._folder.name,
            self._allocation,
            self._config.setup.splitlines(),
            outlives_nodes=self._config.on_host_lost != "stop",
        )
        return step_script(request, self._host_command("--remove-folder"))

    def _find_steps(self) -> bool:
        """Store the numbers of the steps that have begun, and return whether all have begun."""
        num_steps = len(_steps(self._allocation))
        if len(self.job.split()) < num_steps:
            self.job = " ".join(self._slurm.steps(self._job_number, self._folder.name))
        return len(self.job.split()) == num_steps

    @property
    def _all_have_ended(self) -> bool:
        return self._shell is not None and self._shell.poll() is not None

    def check(self) -> None:
        """Raise ClusterError if a host program has ended, Slurm has refused a step, or all steps have ended.
        Soon after the last check this does nothing."""
        if self._was_checked_recently():
            return
        self._checked_mono_s = time.monotonic()
        self._require_hosts()
        # Slurm may refuse one of several steps, and the shell goes on for the others.
        if _REFUSED in self._log():
            raise ClusterError(f"Slurm has refused a step in job {self._job_number}. {self.why_late()}")
        if self._all_have_ended:
            raise ClusterError(f"no step of the cluster in job {self._job_number} runs. {self.why_late()}")

    def joined(self) -> None:
        """Ask for the numbers of steps that had not begun at the end of `start`."""
        self._find_steps()

    def when_lost(self) -> str:
        """Describe the state of the job, and say whether its nodes can be used again."""
        state = self._notebooks_job.state()
        sentence = f"{state[0].upper()}{state[1:]}"
        if self.is_over():
            return f"{sentence}. Start the notebook in another job"
        return f"{sentence}. %nbgpu restart takes the nodes of the job again"

    def _means_the_end(self, state: JobState) -> bool:
        return state.state == "COMPLETING" or state.phase != "running"

    def state(self) -> str:
        """Describe the state of the notebook's job."""
        return self._notebooks_job.state()

    def time_left_s(self) -> float | None:
        """The seconds until the job's time limit; None if it has none or it is not known."""
        return self._notebooks_job.time_left_s()

    def record(self) -> dict[str, Any]:
        """Return the folder of the steps, and the number of the job."""
        return {**super().record(), "own_job": self._job_number}

    @uninterrupted()
    def end(self) -> None:
        """End the steps, and remove their folder. The job stays."""
        try:
            self._end_steps()
        except ClusterError as error:
            warnings.warn(f"{error}. The hosts end by themselves", stacklevel=3)
        self.job = ""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_steps(self) -> None:
        """Wait until the steps have ended with their hosts, then cancel them, and at last kill the shell.

        Raises:
            ClusterError: Slurm does not cancel the steps.
        """
        if self._shell is None:
            if self.job:
                self._slurm.cancel(self.job)
            return
        with suppress(subprocess.TimeoutExpired):
            self._shell.wait(_END_PATIENCE_S)
        if not self._all_have_ended:
            self._find_steps()
            if self.job:
                self._slurm.cancel(self.job)
            with suppress(subprocess.TimeoutExpired):
                self._shell.wait(_END_PATIENCE_S)
        if not self._all_have_ended:
            self._shell.kill()
            self._shell.wait()
        self._shell = None
