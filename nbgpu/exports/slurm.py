"""The export to Slurm: a batch script that starts torchrun once on each node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from nbgpu.exports import filling, shell
from nbgpu.exports.program import Program
from nbgpu.exports.settings import ExportConfig


def files(program: Program, settings: ExportConfig) -> Mapping[str, str]:
    """Return the files of the export, by name."""
    values = {
        "title": program.title,
        "name": program.name,
        "nodes": str(settings.nodes),
        "gpus": f"#SBATCH --gpus-per-node={program.gpus_per_node}" if program.gpus_per_node else "",
        "ranks_per_node": str(program.ranks_per_node),
        "cpus_per_node": str(shell.cpus(program, settings)),
        "threads": str(shell.threads(program, settings)),
        "max_restarts": str(settings.max_restarts),
        "memory": _option("mem", settings.memory),
        "time_limit": _option("time", settings.time_limit),
        "partition": _option("partition", settings.partition),
        "account": _option("account", settings.account),
        "warn_before_s": str(settings.warn_before_s),
        "setup": settings.setup,
        "interface": shell.interface(settings),
        "program": shlex.join(program.arguments),
    }
    return {"job.sbatch": filling.filled("job.sbatch", values), **program.files}


def _option(name: str, value: str) -> str:
    """Return the line of an option; one to be filled in by hand where nothing is given."""
    return f"#SBATCH --{name}={value}" if value else f"##SBATCH --{name}=CHANGE_ME"
