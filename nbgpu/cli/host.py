"""The commands on this machine: `nbgpu doctor`, `top`, `ps`, `stop` and `host`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

from nbgpu.cli.asking import take_value
from nbgpu.cli.catalogue import UsageError
from nbgpu.client.host import doctor as checks
from nbgpu.client.host import ps as clusters
from nbgpu.client.host.device_cards import HostDevices
from nbgpu.client.scaling import hosts_check
from nbgpu.config import ClusterConfig, flags
from nbgpu.host.host_checks import Finding
from nbgpu.machine import interpreter
from nbgpu.text.console import CommandConsole, say, width_of
from nbgpu.ui.devices import terminal
from nbgpu.ui.devices import top as devices_now


def doctor(arguments: list[str]) -> int:
    """Check what works on this machine, and print each finding when its check is done; return the exit code,
    which is 1 if a check has failed."""
    if any(word.split("=")[0] == "--launcher" for word in arguments):
        return _doctor_of_hosts(arguments)
    rest, runs_dir = take_value(arguments, "--runs-dir", "a folder, such as nbgpu_runs")
    if set(rest) - {"--json"}:
        raise UsageError(
            "usage: nbgpu doctor [--json] [--runs-dir FOLDER], or nbgpu doctor --launcher NAME [flags]"
        )
    devices = devices_now.read_once()
    if not rest:
        _console().print(terminal.cards(devices))
        print(flush=True)
    examined = checks.examine(runs_dir or checks.runs_dir(), devices)
    return _report(examined, bool(rest), devices)


def _doctor_of_hosts(arguments: list[str]) -> int:
    """Check the hosts that a launcher provides; return the exit code."""
    rest = [word for word in arguments if word != "--json"]
    values = flags.parse([ClusterConfig], rest, prog="nbgpu doctor", description="Check a launcher's hosts.")
    config = ClusterConfig.checked(**{name: values[name] for name in flags.given(rest, values)})
    if config.is_local:
        raise UsageError("nbgpu doctor without --launcher checks this machine")
    if rest == arguments:
        return _report(hosts_check.examine(config), as_json=False)
    # Messages about the start of a job must not be mixed with the JSON.
    with redirect_stdout(sys.stderr):
        findings = list(hosts_check.examine(config))
    return _report(findings, as_json=True)


def _report(examined: Iterable[Finding], as_json: bool, devices: HostDevices | None = None) -> int:
    """Print findings as they come, or all as JSON with the devices; return the exit code."""
    findings = []
    for finding in examined:
        findings.append(finding)
        if not as_json:
            print(checks.line(finding), flush=True)
    print(checks.as_json(findings, devices) if as_json else checks.summary(findings))
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
    """Return a console that replaces characters, such as bars and degree signs, that the terminal's encoding
    lacks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return CommandConsole(highlight=False)


def stop(arguments: list[str]) -> None:
    """End the named clusters, or all; without arguments, those whose notebook has ended."""
    names = [name for name in arguments if not name.startswith("-")]
    if (unknown := set(arguments) - {*names, "--all"}) or (names and "--all" in arguments):
        error = f"{', '.join(sorted(unknown))} is not a flag. " if unknown else ""
        raise UsageError(f"{error}usage: nbgpu stop [ID ...] or nbgpu stop --all. `nbgpu ps` lists the ids")
    ended = clusters.stop(names, everything="--all" in arguments)
    print("\n".join(ended or ["nothing was left over"]))


def ps(arguments: list[str]) -> None:
    """Print the clusters of this user on this machine."""
    if arguments:
        raise UsageError("usage: nbgpu ps")
    console = _console()
    say(console, clusters.table(width_of(console)))


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
