"""Which launcher a cluster's settings ask for."""

from __future__ import annotations

from nbgpu.client.launchers.launcher import Launcher, NoLauncher
from nbgpu.client.launchers.slurm_launcher import SlurmLauncher
from nbgpu.client.launchers.ssh_launcher import SshLauncher
from nbgpu.config import ClusterConfig


def launcher_of(config: ClusterConfig) -> Launcher:
    """Return the launcher of these settings, which has started nothing yet.

    Raises:
        ConfigError: a setting of the launcher is wrong.
    """
    if config.launcher == "ssh":
        return SshLauncher(config)
    if config.launcher == "slurm":
        return SlurmLauncher(config)
    return NoLauncher(config)
