"""What starts the hosts of a cluster: one interface for all launchers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from nbgpu.config import ClusterConfig
from nbgpu.machine import interfaces


def print_at_once(line: str) -> None:
    """Print a line below the cell, or on the terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Launcher(ABC):
    """Starts hosts that dial in, and ends them. The calls come in the order in which they stand here. Where a
    launcher knows nothing of its hosts, it leaves the answers as they are here.

    Args:
        config: the settings of the cluster.
        tell: a function that shows a line to the person who waits for the start.
    """

    job = ""
    """The number of Slurm's job that has the hosts; empty where there is none."""

    def __init__(self, config: ClusterConfig, tell: Callable[[str], None] = print_at_once) -> None:
        self._config = config
        self._tell = tell

    def listen_at(self) -> tuple[str, str]:
        """Return the name and the address of the interface at which the hosts find this one.

        Raises:
            ClusterError: the hosts cannot be had.
            ConfigError: there is no such interface.
        """
        return interfaces.address_of(self._config.interface)

    @abstractmethod
    def start(self, join_file: Path, interface: str) -> None:
        """Start the hosts and return before they have dialled in.

        Args:
            join_file: the file with which they dial in.
            interface: the one at which the hosts find this host, for messages.

        Raises:
            ClusterError: one does not start.
        """

    def check(self) -> None:  # noqa: B027 - a launcher may have nothing to do
        """Raise ClusterError if a host will not come. Called often until all hosts have dialled in."""

    def is_waiting(self) -> bool:
        """Whether the hosts cannot dial in yet, as while a job waits. Their time has not begun then."""
        return False

    @abstractmethod
    def why_late(self) -> str:
        """Return sentences for the message that hosts have not come in time."""

    def joined(self) -> None:  # noqa: B027 - a launcher may have nothing to do
        """Take note that all hosts have dialled in."""

    @abstractmethod
    def when_lost(self) -> str:
        """Say what to do when a host is lost, in whole sentences without the last full stop."""

    def state(self) -> str:
        """Describe the job that has the hosts, and the time that it has left; empty where there is none."""
        return ""

    def time_left_s(self) -> float | None:
        """The time until the hosts are taken away; None where no such time is known."""
        return None

    def end(self) -> None:  # noqa: B027 - a launcher may have nothing to do
        """End what is left of the hosts, and what was made for them. Harmless when repeated."""


class NoLauncher(Launcher):
    """Starts nothing: somebody starts the hosts, and they dial in."""

    def start(self, join_file: Path, interface: str) -> None:
        """Tell the person what to start on the hosts. The start waits for them meanwhile."""
        self._tell(
            f"waiting for {self._config.num_hosts} host(s), which reach this one at {interface}. On each of them: nbgpu "
            f"host --join {join_file}"
        )

    def why_late(self) -> str:
        """Say how a host dials in."""
        return (
            "A host dials in with `nbgpu host --join FILE`, which says there where it looks for the cluster"
        )

    def when_lost(self) -> str:
        """Each host is started by hand."""
        return "%nbgpu restart starts it again, when each host has to dial in once more"
