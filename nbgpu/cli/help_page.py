"""`nbgpu COMMAND --help` of commands whose arguments are few."""

from __future__ import annotations

from nbgpu.cli.catalogue import Command
from nbgpu.config import flags_help


def show(command: Command) -> None:
    """Print what a command does, with examples."""
    flags_help.show(f"nbgpu {command.usage}", sentence(command), {}, command.examples)


def sentence(command: Command) -> str:
    """What a command does, as a sentence."""
    return f"{command.what[0].upper()}{command.what[1:]}."
