"""The launchers by name, with the settings of a cluster that each launcher takes.

A launcher consists of a class in `nbgpu/client/launchers`, which this module names and does not import, and a
class of settings here. `ClusterConfig` checks a launcher's settings by the class of settings, whose class
variables tell the rest of nbgpu how launchers differ, so that no other module compares a launcher's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nbgpu.machine import slurm_job
from nbgpu.machine.slurm_job import OwnJob
from nbgpu.text.similar import did_you_mean

_LAUNCHERS = "nbgpu.client.launchers"


@dataclass(frozen=True)
class LauncherSettings:
    """The settings of a cluster that one launcher takes: the base class for all launchers."""

    NAME: ClassVar[str]
    MEANING: ClassVar[str]
    """A phrase on where the ranks run, for the description of `launcher`."""
    IMPLEMENTATION: ClassVar[str]
    """The class that starts the hosts, as 'module:Class'."""
    TAKES: ClassVar[tuple[str, ...]] = ()
    """The settings of `OPTIONAL` that have an effect with this launcher."""
    OPTIONS_MEANING: ClassVar[str] = ""
    """The launcher's part of the description of `launcher_options`, in whole sentences."""
    IS_LOCAL: ClassVar[bool] = False
    """Whether the ranks run on the notebook's host, and no host is started."""
    IS_JOB: ClassVar[bool] = False
    """Whether the hosts belong to a scheduler's job, which chooses their GPUs and has a time limit."""
    IS_STARTED_BY_HAND: ClassVar[bool] = False
    """Whether a person starts the hosts, so that nbgpu cannot start a second cluster on them."""

    host_names: Sequence[str]
    num_nodes: int | None
    options: Mapping[str, str | bool]
    """The `launcher_options` by name; True for one without a value."""
    ipython_profile: str
    most_free_gpus: int | None
    """N of gpus='free:N'; None for every other value."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each missing setting that the launcher needs, and for each given setting that
        it does not take."""
        yield from ()

    @property
    def num_hosts(self) -> int:
        """The number of hosts that have ranks."""
        return self.num_nodes or 1

    @property
    def own_job(self) -> OwnJob | None:
        """The Slurm job in which this process runs, if the ranks are to run on its nodes; else None."""
        return None

    def _unknown_options(self, owner: str, names: tuple[str, ...]) -> Iterator[str]:
        if unknown := [name for name in self.options if name not in names]:
            yield (
                f"launcher_options: {unknown[0]} is none of {owner}.{did_you_mean(unknown[0], names)} "
                f"It takes {' and '.join(names)}"
            )


class LocalSettings(LauncherSettings):
    """The ranks run on the notebook's host."""

    NAME = "local"
    MEANING = "on the notebook's host"
    IMPLEMENTATION = f"{_LAUNCHERS}.hosts_launcher:NoLauncher"
    IS_LOCAL = True


class SshSettings(LauncherSettings):
    """ssh starts the hosts."""

    NAME = "ssh"
    MEANING = "on the hosts that `hosts` names"
    IMPLEMENTATION = f"{_LAUNCHERS}.ssh_launcher:SshLauncher"
    TAKES = ("hosts", "launcher_options", "setup")
    OPTIONS_MEANING = (
        "With 'ssh': python=PATH, the Python of the hosts (left out: this one's path), and ssh='-p 2222', arguments of "
        "ssh."
    )

    def problems(self) -> Iterator[str]:
        """Yield a sentence if no host is named, and one for unknown options."""
        if not self.host_names:
            yield "hosts='' names no host on which launcher='ssh' could start ranks: hosts=['node1', 'node2']"
        yield from self._unknown_options("launcher='ssh'", ("python", "ssh"))

    @property
    def num_hosts(self) -> int:
        """The number of hosts that `hosts` names."""
        return len(self.host_names)


class SlurmSettings(LauncherSettings):
    """A Slurm job has the hosts."""

    NAME = "slurm"
    MEANING = "on the nodes of a Slurm job, that of the notebook where it is in one"
    IMPLEMENTATION = f"{_LAUNCHERS}.slurm_launcher:SlurmLauncher"
    TAKES = ("nodes", "launcher_options", "setup")
    OPTIONS_MEANING = (
        "With 'slurm': options of sbatch without their dashes, such as 'partition=gpu time=2:00:00', python=PATH, and "
        "folder=PATH, which all nodes see (left out: the home folder); where the notebook is in a job itself, python, "
        "folder and new_job, which asks for another job."
    )
    IS_JOB = True

    def problems(self) -> Iterator[str]:
        """Yield a sentence if free GPUs were asked for, which Slurm chooses itself. Unknown options are left
        to sbatch."""
        if self.most_free_gpus:
            yield (
                f"gpus='free:{self.most_free_gpus}' does not go with launcher='slurm': Slurm chooses the GPUs of a job. Ask it "
                f"for so many with launcher_options='gpus-per-node={self.most_free_gpus}', and leave gpus out"
            )

    @property
    def num_hosts(self) -> int:
        """The number of nodes that the settings name, or else that of the notebook's own job."""
        job = self.own_job
        return self.num_nodes or (1 if job is None else job.num_nodes)

    @property
    def own_job(self) -> OwnJob | None:
        """The Slurm job of this process, unless the options request a new job."""
        return None if slurm_job.NEW_JOB in self.options else slurm_job.own_job()


class HostsSettings(LauncherSettings):
    """A person or a launcher of ipyparallel starts the hosts, which then connect to the cluster."""

    NAME = "hosts"
    MEANING = (
        "on hosts that dial in with `nbgpu host --join FILE`, which a person or any scheduler starts there"
    )
    IMPLEMENTATION = f"{_LAUNCHERS}.hosts_launcher:NoLauncher"
    TAKES = ("nodes", "launcher_options", "ipython_profile")
    OPTIONS_MEANING = "With an ipython_profile: python=PATH and folder=PATH."
    IS_STARTED_BY_HAND = True

    def problems(self) -> Iterator[str]:
        """Yield a sentence for options without effect."""
        if self.ipython_profile:
            yield from self._unknown_options("an ipython_profile", ("python", "folder"))
        elif self.options:
            yield "launcher_options count with launcher='hosts' only beside an ipython_profile, because nothing is started otherwise"


LAUNCHERS: dict[str, type[LauncherSettings]] = {
    settings.NAME: settings for settings in (LocalSettings, SshSettings, SlurmSettings, HostsSettings)
}
"""The class of settings by the launcher's name, in the order in which the docs and the controls list them."""
OPTIONAL = ("nodes", "hosts", "launcher_options", "setup", "ipython_profile")
"""The settings of a cluster that have an effect with some launchers and not with others."""
