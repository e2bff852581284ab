"""What starts the hosts of a cluster: one interface for all launchers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

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
    """

    starts_again = False
    """Whether the launcher can start a host again that was lost."""

    uses_notebooks_job = False
    """Whether the hosts are in the Slurm job that the notebook itself is in."""

    job = ""
    """The number of Slurm's job that has the hosts, or of the steps within the notebook's own, separated by
    spaces; empty where there is none."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.tell: Callable[[str], None] = print_at_once
        """Shows a line to the person who waits for the start."""

    @classmethod
    def create(cls, config: ClusterConfig) -> Launcher:
        """Return the launcher of these settings: this class, where it leaves some to no other.

        Raises:
            ConfigError: a setting of the launcher is wrong.
        """
        return cls(config)

    @classmethod
    def adopt(cls, config: ClusterConfig, record: Mapping[str, Any]) -> Launcher:
        """Return a launcher for the hosts of a kept cluster, whose state `take_over` restores. `record` says
        which class has started them, where the settings alone leave that open."""
        return cls.create(config)

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

    def is_over(self) -> bool:
        """Whether no lost host can come back, and the others end too, as at the end of a job."""
        return False

    def obstacle(self) -> str:
        """Say why lost hosts are not back yet, in a sentence without its full stop; nothing where the
        launcher does not know."""
        return ""

    def start_again(self, join_file: Path) -> str:
        """Start the hosts again whose programs have ended, if that is possible now; return in words what
        prevents it for the rest, '' if nothing does. Called on a thread of its own, again and again while a
        host is lost.

        Args:
            join_file: the file with which they dial in.

        Raises:
            ClusterError: it does not work now.
        """
        raise NotImplementedError

    def state(self) -> str:
        """Describe the job that has the hosts, and the time that it has left; empty where there is none."""
        return ""

    def time_left_s(self) -> float | None:
        """The time until the hosts are taken away; None where no such time is known."""
        return None

    def record(self) -> dict[str, Any]:
        """Return what `take_over` needs, for JSON."""
        return {}

    def take_over(self, job: str, record: Mapping[str, Any]) -> None:  # noqa: B027 - a launcher may need nothing
        """Restore the state of the launcher that started the hosts of a kept cluster, in a process that is
        gone.

        Args:
            job: its `job`.
            record: what its `record` returned.
        """

    def end(self) -> None:  # noqa: B027 - a launcher may have nothing to do
        """End what is left of the hosts, and what was made for them. Harmless when repeated."""


def launcher_of(config: ClusterConfig) -> Launcher:
    """Return the launcher of a cluster's settings, which has started nothing yet.

    Raises:
        ConfigError: a setting of the launcher is wrong.
    """
    return _implementation(config).create(config)


def restored_launcher(config: ClusterConfig, job: str, record: Mapping[str, Any]) -> Launcher:
    """Return the launcher of a kept cluster, as its entry in the registry describes it.

    Args:
        config: the settings of the cluster.
        job: the number of its Slurm job or steps; empty where there is none.
        record: the launcher's `record`.
    """
    launcher = _implementation(config).adopt(config, record)
    launcher.take_over(job, record)
    return launcher


def _implementation(config: ClusterConfig) -> type[Launcher]:
    implementation: type[Launcher] = resolve_name(config.launcher_settings.IMPLEMENTATION)
    return implementation
