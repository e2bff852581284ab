"""Makes the batch script of a cluster's Slurm job, which runs the host program as one task on each node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbgpu.errors import ConfigError

_REFUSED = {
    "nodes": "it is the setting `nodes`",
    "gpus-per-node": "it is the setting `gpus_per_node`",
    "ntasks": "each node has one task",
    "ntasks-per-node": "each node has one task",
    "output": "nbgpu reads the job's output",
    "error": "nbgpu reads the job's output",
    "signal": "nbgpu looks at the time left itself, and a signal would end the ranks",
    "array": "a cluster is one job",
    "clusters": "only the Slurm of this host can be asked about the job later",
    "export": "the ranks get this notebook's environment",
    "wrap": "the job is nbgpu's own",
}
"""The options of sbatch that a user cannot give, each with the reason."""
_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "e": "error",
    "a": "array",
    "M": "clusters",
    "p": "partition",
}
"""The long names of the options that nbgpu reads, by their short names."""
_OPTION = re.compile(r"[A-Za-z](?:[A-Za-z0-9-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class SlurmRequest:
    """The resources and options of a job."""

    nodes: int
    name: str
    output: Path
    """The file to which Slurm writes the job's output."""
    gpus_per_node: int | None = None
    """None requests no GPUs."""
    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    """More options of sbatch, without dashes, such as {'partition': 'gpu', 'time': '2:00:00'}. True stands
    for an option without a value; False leaves the option out."""
    setup: Sequence[str] = ()
    """Lines of shell before the hosts start, such as 'module load cuda'."""
    outlives_nodes: bool = False
    """Whether the job goes on when one of its nodes fails."""


def batch_script(request: SlurmRequest, command: Sequence[str]) -> str:
    """Return the script for sbatch, which runs `command` once on each node.

    Raises:
        ConfigError: an option is not one, or is not the user's to give.
    """
    options: dict[str, str | int | bool] = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "output": str(request.output),
        # After a requeue, the output is appended to that of the first run.
        "open-mode": "append",
        # Many sites requeue jobs by default, and the hosts of the second run would not be in the cluster.
        "no-requeue": True,
    }
    if request.outlives_nodes:
        options["no-kill"] = True
    if request.gpus_per_node:
        options["gpus-per-node"] = request.gpus_per_node
    options |= _checked(request.options)
    if options.get("requeue"):
        del options["no-requeue"]
    lines = [
        # A login shell, because many sites define `module` only there.
        "#!/bin/bash -l",
        *(f"#SBATCH {_option(name, value)}" for name, value in options.items() if value is not False),
        *_checked_setup(request.setup),
        # When one host ends, Slurm must not end the others: nbgpu decides what happens to them.
        # srun does not inherit --cpus-per-task from the job.
        f"exec srun --kill-on-bad-exit=0 --wait=0{' --no-kill' if request.outlives_nodes else ''} "
        "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\",
        f"  {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def long_name(given: str) -> str:
    """Return the name of an option of sbatch without dashes. Short names in `_SHORT` become long ones."""
    name = given.lstrip("-").replace("_", "-")
    return _SHORT.get(name, name)


def _checked(options: Mapping[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Check the user's options, and return them by their `long_name`.

    Raises:
        ConfigError: options cannot be given; the message has a line for each.
    """
    problems = []
    checked: dict[str, str | int | bool] = {}
    for given, value in options.items():
        name = long_name(given)
        if not _OPTION.fullmatch(name):
            problems.append(f"launcher_options: {given!r} is not the name of an option of sbatch")
        elif name in _REFUSED:
            problems.append(f"launcher_options: {given!r} cannot be given, because {_REFUSED[name]}")
        elif isinstance(value, str) and not value.isprintable():
            is_long = len(value.splitlines()) > 1
            what = "is more than one line" if is_long else "has a character that cannot be printed"
            problems.append(f"launcher_options: {given}={value!r} {what}")
        checked[name] = value
    if problems:
        raise ConfigError("\n".join(problems))
    return checked


def _checked_setup(lines: Sequence[str]) -> list[str]:
    """Return the lines of the setting `setup`. Raise ConfigError if sbatch would read options in one: they
    stand before the first command, where sbatch reads its own options and those of PBS and LSF."""
    problems = [
        f"setup: {line!r} would be read as an option of sbatch"
        for line in lines
        if any(word in line for word in ("#SBATCH", "#PBS", "#BSUB"))
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return list(lines)


def _option(name: str, value: str | int | bool) -> str:
    """Write an option as in a line of a batch script, where sbatch has its own rules of quoting."""
    dashes = "-" if len(name) == 1 else "--"
    if value is True:
        return f"{dashes}{name}"
    text = str(value)
    if re.search(r"[\s\"'\\#]", text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return f"{dashes}{name}={text}" if len(name) > 1 else f"{dashes}{name} {text}"
