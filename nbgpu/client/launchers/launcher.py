"""The interface of launchers, which start the other hosts of a cluster: by ssh, Slurm or ipyparallel."""

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
    """Starts hosts, which then dial in (connect to the controller), and ends them. The methods are called in
    this order. A launcher overrides those for which it has an answer.

    Args:
        config: the settings of the cluster.
    """

    starts_again = False
    """Whether the launcher can start a lost host again."""

    uses_notebooks_job = False
    """Whether the hosts are nodes of the Slurm job in which the notebook itself runs."""

    job = ""
    """The number of the Slurm job with the hosts, or the numbers of its steps, separated by spaces, if it is
    the notebook's own job; empty without Slurm."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.tell: Callable[[str], None] = print_at_once
        """Shows a line to the person who waits for the start."""

    @classmethod
    def create(cls, config: ClusterConfig) -> Launcher:
        """Return a launcher for these settings: of this class, unless it leaves the settings to another one.

        Raises:
            ConfigError: a setting of the launcher is wrong.
        """
        return cls(config)

    @classmethod
    def adopt(cls, config: ClusterConfig, record: Mapping[str, Any]) -> Launcher:
        """Return a launcher for the hosts of a kept cluster, before `take_over` restores its state. If the
        settings leave open which class has started the hosts, `record` tells it."""
        return cls.create(config)

    def listen_at(self) -> tuple[str, str]:
        """Return the name and the address of the network interface at which this host listens for the others.

        Raises:
            ClusterError: the launcher cannot get hosts, as when Slurm does not answer.
            ConfigError: there is no such interface.
        """
        return interfaces.address_of(self._config.interface)

    @abstractmethod
    def start(self, join_file: Path, interface: str) -> None:
        """Start the hosts and return before they have dialled in.

        Args:
            join_file: the file with which they dial in.
            interface: the interface from `listen_at`, for messages.

        Raises:
            ClusterError: a host does not start.
        """

    def check(self) -> None:  # noqa: B027 - a launcher may have nothing to do
        """Raise ClusterError if a host cannot dial in any more. Called often until all have dialled in."""

    def is_waiting(self) -> bool:
        """Whether the hosts cannot dial in yet, as while a job is in the queue. `start_timeout_s` begins when
        they can."""
        return False

    @abstractmethod
    def why_late(self) -> str:
        """Return sentences for the message that hosts have not dialled in in time."""

    def joined(self) -> None:  # noqa: B027 - a launcher may have nothing to do
        """Called once all hosts have dialled in."""

    @abstractmethod
    def when_lost(self) -> str:
        """Say what to do when a host is lost, in whole sentences without the last full stop."""

    def is_over(self) -> bool:
        """Whether lost hosts cannot come back and the others end too, as at the end of a job."""
        return False

    def obstacle(self) -> str:
        """Say why lost hosts are not back yet, in a sentence without its full stop; empty if that is not
        known."""
        return ""

    def start_again(self, join_file: Path) -> str:
        """Start the hosts whose programs have ended again, where that is possible now. Called repeatedly on a
        background thread while a host is lost.

        Args:
            join_file: the file with which they dial in.

        Returns:
            What prevents it for the other hosts, in words; empty if nothing does.

        Raises:
            ClusterError: no host can be started now.
        """
        raise NotImplementedError

    def state(self) -> str:
        """Describe the job with the hosts, and the time that it has left; empty if there is no job."""
        return ""

    def time_left_s(self) -> float | None:
        """The seconds until the time limit of the hosts' job; None if there is none.

        Raises:
            ClusterError: it is not known at present.
        """
        return None

    def record(self) -> dict[str, Any]:
        """Return the state that `take_over` restores, as JSON values."""
        return {}

    def take_over(self, job: str, record: Mapping[str, Any]) -> None:  # noqa: B027 - a launcher may need nothing
        """Restore the state of the launcher that has started the hosts of a kept cluster in another process.

        Args:
            job: that launcher's `job`.
            record: the result of its `record`.
        """

    def end(self) -> None:  # noqa: B027 - a launcher may have nothing to do
        """End the hosts that still run, and remove what was made for them. A second call does nothing."""


def launcher_of(config: ClusterConfig) -> Launcher:
    """Return a new launcher for a cluster's settings.

    Raises:
        ConfigError: a setting of the launcher is wrong.
    """
    return _implementation(config).create(config)


def restored_launcher(config: ClusterConfig, job: str, record: Mapping[str, Any]) -> Launcher:
    """Return the launcher of a kept cluster, as its entry in the registry describes it.

    Args:
        config: the settings of the cluster.
        job: the launcher's `job`.
        record: the launcher's `record`.
    """
    launcher = _implementation(config).adopt(config, record)
    launcher.take_over(job, record)
    return launcher


def _implementation(config: ClusterConfig) -> type[Launcher]:
    implementation: type[Launcher] = resolve_name(config.launcher_settings.IMPLEMENTATION)
    return implementation
