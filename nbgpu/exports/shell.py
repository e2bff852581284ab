"""The export to torchrun: a shell script that is the same on every machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from nbgpu.exports import filling
from nbgpu.exports.program import Program
from nbgpu.exports.settings import ExportConfig


def files(program: Program, settings: ExportConfig) -> Mapping[str, str]:
    """Return the files of the export, by name."""
    least = settings.min_nodes
    values = {
        "title": program.title,
        "file_name": program.file_name,
        "name": program.name,
        "nnodes": f"{least}:{settings.nodes}" if least is not None else str(settings.nodes),
        "ranks_per_node": str(program.ranks_per_node),
        "max_restarts": str(settings.max_restarts),
        "threads": str(threads(program, settings)),
        "setup": settings.setup,
        "interface": interface(settings),
        "program": shlex.join(program.arguments),
    }
    return {"torchrun.sh": filling.filled("torchrun.sh", values), **program.files}


def interface(settings: ExportConfig) -> str:
    """Return the line that names the network interface; empty where none is chosen."""
    if not settings.interface:
        return ""
    return f"export GLOO_SOCKET_IFNAME={settings.interface} NCCL_SOCKET_IFNAME={settings.interface}"


def cpus(program: Program, settings: ExportConfig) -> int:
    """Return the CPU cores of each machine."""
    return settings.cpus_per_node or 4 * program.ranks_per_node


def threads(program: Program, settings: ExportConfig) -> int:
    """Return the CPU threads of each rank."""
    return max(1, cpus(program, settings) // program.ranks_per_node)
