"""The launcher of `launcher="ssh"`: starts the host program on all named hosts at the same time, by ssh."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.launchers.ssh import RemoteProcess, SshHosts, SshOptions
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError
from nbgpu.machine import interfaces
from nbgpu.machine.signals import uninterrupted

_PROGRAM = (
    "{python}",
    "-P",
    "-m",
    "nbgpu.engine.process.host",
    "{folder}/connection.json",
    "--remove-folder",
)
_CHECK_PERIOD_S = 2.0
"""Each check is a command on every host."""
_SSH_PORT = 22


class SshLauncher(Launcher):
    """Starts the host program on the hosts that the settings name.

    Args:
        config: the settings of the cluster.
    """

    starts_again = True

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        options = {name: str(value) for name, value in config.options_of_launcher.items()}
        self._settings = SshOptions(
            options.get("python", sys.executable), shlex.split(options.get("ssh", "")), setup=config.setup
        )
        self._connections: SshHosts | None = None
        self._started: list[RemoteProcess] = []
        self._checked_mono_s = 0.0
        self._has_ended = False
        """Whether `end` was called, possibly while another thread starts a host again."""

    @property
    def _hosts(self) -> SshHosts:
        """The connections to all hosts, made at the first use."""
        if self._connections is None:
            self._connections = SshHosts(self._config.host_names, self._settings)
        return self._connections

    def listen_at(self) -> tuple[str, str]:
        """Connect to all hosts, and compare their versions with those here. Return the interface that the
        settings name, or else the one from which the hosts see this host's connections come."""
        callers = self._hosts.reach()
        if self._config.interface != "auto":
            return super().listen_at()
        names = interfaces.names_by_address()
        counts = Counter(address for address in callers if address in names)
        if counts:
            ((address, _),) = counts.most_common(1)
            return names[address], address
        # The connections pass through another host (a jump host or NAT), and the hosts see its address.
        name, address = interfaces.towards(self._config.host_names[0].rpartition("@")[2], _SSH_PORT)
        return interfaces.address_of("auto") if address == interfaces.LOOPBACK else (name, address)

    def start(self, join_file: Path, interface: str) -> None:
        """Start the host program on all hosts at the same time."""
        self._has_ended = False
        with uninterrupted():
            self._started = self._hosts.start(_PROGRAM, join_file.read_text())
        self._checked_mono_s = time.monotonic()

    def check(self) -> None:
        """Raise ClusterError if a host's program has ended, with the end of its log."""
        if time.monotonic() - self._checked_mono_s < _CHECK_PERIOD_S:
            return
        ended = self._hosts.ended(self._started)
        self._checked_mono_s = time.monotonic()
        if ended:
            raise ClusterError("\n".join(self._last_output(process) for process in ended))

    def _last_output(self, process: RemoteProcess) -> str:
        log = self._hosts.log(process).strip()
        return f"{process.host} did not join. {_sentence(log) if log else 'It wrote nothing to its log.'}"

    def why_late(self) -> str:
        """The last lines of the hosts' logs."""
        logs = {process.host: self._hosts.log(process).strip() for process in self._started}
        return " ".join(f"{host} wrote: {_sentence(log)}" for host, log in logs.items() if log)

    def joined(self) -> None:
        """Close the ssh connections: hosts that have joined talk to the controller, and need no ssh."""
        self._close()

    def start_again(self, join_file: Path) -> str:
        """Start the host program again where it has ended and ssh reaches the host."""
        obstacles = []
        for index, process in enumerate(list(self._started)):
            try:
                with SshHosts([process.host], self._settings) as host:
                    if host.still_runs(process):
                        continue
                    (started,) = host.start(_PROGRAM, join_file.read_text())
                    if self._has_ended:
                        host.end([started])
                        return ""
            except (ClusterError, OSError) as error:
                obstacles.append(str(error))
                continue
            self._started[index] = started
        return "; ".join(obstacles)

    def when_lost(self) -> str:
        """Say that a restart of the cluster starts all hosts again."""
        return "%nbgpu restart starts it again, on all hosts"

    def record(self) -> dict[str, Any]:
        """Return the processes of the host programs."""
        return {"started": [asdict(process) for process in self._started]}

    def take_over(self, job: str, record: Mapping[str, Any]) -> None:
        """Take over the host programs that another process has started, to end them."""
        self._started = [RemoteProcess(**process) for process in record.get("started", [])]

    @uninterrupted()
    def end(self) -> None:
        """End the host programs that still run, remove their folders, and close the connections."""
        self._has_ended = True
        if self._started:
            self._hosts.end(self._started)
            self._started = []
        self._close()

    @uninterrupted()
    def _close(self) -> None:
        if self._connections is not None:
            self._connections.close()
            self._connections = None


def _sentence(text: str) -> str:
    """The text, with a full stop if it has no mark at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
