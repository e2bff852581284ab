"""This machine: `nbgpu doctor`, `top`, `ps`, `stop` and `host`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from nbgpu.cli.asking import take_value
from nbgpu.cli.usage import UsageError
from nbgpu.client.host import doctor as checks
from nbgpu.client.host import ps as clusters
from nbgpu.config import (
    TrainConfig,
)
from nbgpu.machine import interpreter
from nbgpu.text.console import CommandConsole
from nbgpu.ui.devices import terminal
from nbgpu.ui.devices import top as devices_now


def doctor(arguments: list[str]) -> int:
    """Print the findings as they come. Returns the exit code, which is 1 if something does not work."""
    rest, runs_dir = take_value(arguments, "--runs-dir", "a folder, such as nbgpu_runs")
    if set(rest) - {"--json"}:
        raise UsageError("usage: nbgpu doctor [--json] [--runs-dir FOLDER]")
    devices = devices_now.read_once()
    if not rest:
        _console().print(terminal.cards(devices))
        print(flush=True)
    findings = []
    for finding in checks.examine(runs_dir or str(TrainConfig.model_fields["runs_dir"].default)):
        findings.append(finding)
        if not rest:
            print(checks.line(finding), flush=True)
    print(checks.as_json(findings, devices) if rest else checks.summary(findings))
    return checks.exit_code(findings)


def top(arguments: list[str]) -> None:
    """Show the devices: live on a terminal, and else once."""
    if set(arguments) - {"--once", "--json"}:
        raise UsageError("usage: nbgpu top [--once] [--json]")
    console = _console()
    if "--json" in arguments:
        print(json.dumps(devices_now.read_once().as_json(), indent=2))
    elif "--once" in arguments or not console.is_terminal or console.is_dumb_terminal:
        console.print(terminal.cards(devices_now.read_once()))
    else:
        devices_now.watch(console)


def _console() -> CommandConsole:
    # In a terminal of another encoding than UTF-8 a bar or a degree sign is no reason to fail.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return CommandConsole(highlight=False)


def stop(arguments: list[str]) -> None:
    names = [name for name in arguments if not name.startswith("-")]
    if (unknown := set(arguments) - {*names, "--all"}) or (names and "--all" in arguments):
        wrong = f"{', '.join(sorted(unknown))} is not a flag. " if unknown else ""
        raise UsageError(f"{wrong}usage: nbgpu stop [ID ...] or nbgpu stop --all. `nbgpu ps` lists the ids")
    ended = clusters.stop(names, everything="--all" in arguments)
    print("\n".join(ended or ["nothing was left over"]))


def ps(arguments: list[str]) -> None:
    """Print the clusters of this user on this machine."""
    if arguments:
        raise UsageError("usage: nbgpu ps")
    print(clusters.table())


def host(arguments: list[str]) -> NoReturn:
    """Make this machine a host of a cluster, until the cluster ends."""
    rest, join_file = take_value(arguments, "--join", "the file that the cluster's start has named")
    if rest or join_file is None:
        raise UsageError("usage: nbgpu host --join FILE")
    if not Path(join_file).is_file():
        raise UsageError(
            f"there is no file {join_file}. The start of the cluster names it, as does cluster.join_file"
        )
    command = interpreter.command("nbgpu.engine.process.host", join_file)
    os.execv(command[0], command)
