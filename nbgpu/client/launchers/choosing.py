"""Which launcher a cluster's settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from nbgpu.client.launchers.launcher import Launcher, NoLauncher, print_at_once
from nbgpu.client.launchers.profile_launcher import ProfileLauncher
from nbgpu.client.launchers.slurm_launcher import SlurmLauncher
from nbgpu.client.launchers.ssh_launcher import SshLauncher
from nbgpu.config import ClusterConfig


def launcher_of(config: ClusterConfig, tell: Callable[[str], None] = print_at_once) -> Launcher:
    """Return the launcher of these settings, which has started nothing yet.

    Args:
        config: the settings of the cluster.
        tell: a function that shows a line to the person who waits for the start.

    Raises:
        ConfigError: a setting of the launcher is wrong.
    """
    if config.launcher == "ssh":
        return SshLauncher(config, tell)
    if config.launcher == "slurm":
        return SlurmLauncher(config, tell)
    if config.ipython_profile:
        return ProfileLauncher(config, tell)
    return NoLauncher(config, tell)
