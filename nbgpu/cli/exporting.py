"""`nbgpu export`."""

from __future__ import annotations

from pathlib import Path

from nbgpu.cli.asking import general_help
from nbgpu.cli.command_flags import ExportFlags
from nbgpu.cli.usage import UsageError
from nbgpu.config import flags
from nbgpu.exports import export as exports
from nbgpu.exports.settings import ExportConfig

_FIRST = ("to", "nodes", "gpus_per_node", "time_limit", "memory", "partition", "image", "claim", "out")
"""The flags that `--help` lists."""


def export(arguments: list[str]) -> None:
    """Write the files with which a run or a notebook's distributed cells run elsewhere."""
    general_help("export", arguments, [ExportFlags, ExportConfig], first=_FIRST)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "usage: nbgpu export RUN_OR_NOTEBOOK --to torchrun|slurm|job|jobset|trainjob [flags], and nbgpu export --help"
        )
    what, *rest = arguments
    values = flags.parse(
        [ExportFlags, ExportConfig],
        rest,
        prog=f"nbgpu export {what}",
        description=flags.summary(ExportConfig),
        first=_FIRST,
    )
    given = {name: values[name] for name in flags.given(rest, ExportConfig.model_fields)}
    print(exports.of_path(Path(what).expanduser(), values["to"], given))
