"""The exports as a shell script, to torchrun and to Slurm, and the templates that every export fills in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from importlib import resources

from nbgpu.exports.program import Program
from nbgpu.exports.settings import ExportConfig


def filled(file: str, values: Mapping[str, str]) -> str:
    """Return a template with `@{name}` replaced by values.

    A line that consists of a name whose value is empty is left out. A value of several lines is indented as
    it is given.
    """
    text = (resources.files("nbgpu.exports") / "templates" / file).read_text()
    lines = []
    for line in text.splitlines():
        whole = re.fullmatch(r"@\{(\w+)\}", line)
        if whole and not values[whole[1]]:
            continue
        lines.append(re.sub(r"@\{(\w+)\}", lambda found: values[found[1]], line))
    return "\n".join(lines) + "\n"


def torchrun_files(program: Program, settings: ExportConfig) -> Mapping[str, str]:
    """Return the files of the export to torchrun, by name; the script is the same on every machine."""
    least = settings.min_nodes
    values = {
        "file_name": program.file_name,
        "nnodes": f"{least}:{settings.nodes}" if least is not None else str(settings.nodes),
    }
    return {"torchrun.sh": filled("torchrun.sh", values | _common(program, settings)), **program.files}


def slurm_files(program: Program, settings: ExportConfig) -> Mapping[str, str]:
    """Return the files of the export to Slurm, by name."""
    values = {
        "nodes": str(settings.nodes),
        "gpus": f"#SBATCH --gpus-per-node={program.gpus_per_node}" if program.gpus_per_node else "",
        "cpus_per_node": str(cpus(program, settings)),
        "memory": _option("mem", settings.memory),
        "time_limit": _option("time", settings.time_limit),
        "partition": _option("partition", settings.partition),
        "account": _option("account", settings.account),
        "warn_before_s": str(settings.warn_before_s),
    }
    return {"job.sbatch": filled("job.sbatch", values | _common(program, settings)), **program.files}


def _common(program: Program, settings: ExportConfig) -> dict[str, str]:
    """Return what both scripts say."""
    interface = settings.interface
    return {
        "title": program.title,
        "name": program.name,
        "ranks_per_node": str(program.ranks_per_node),
        "max_restarts": str(settings.max_restarts),
        "threads": str(threads(program, settings)),
        "setup": settings.setup,
        "interface": f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
        if interface
        else "",
        "program": shlex.join(program.arguments),
    }


def _option(name: str, value: str) -> str:
    """Return the line of an option; one to be filled in by hand where nothing is given."""
    return f"#SBATCH --{name}={value}" if value else f"##SBATCH --{name}=CHANGE_ME"


def cpus(program: Program, settings: ExportConfig) -> int:
    """Return the CPU cores of each machine."""
    return settings.cpus_per_node or 4 * program.ranks_per_node


def threads(program: Program, settings: ExportConfig) -> int:
    """Return the CPU threads of each rank."""
    return max(1, cpus(program, settings) // program.ranks_per_node)
