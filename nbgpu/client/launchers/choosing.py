"""Which launcher a cluster's settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbgpu.client.launchers.launcher import Launcher, NoLauncher, print_at_once
from nbgpu.client.launchers.profile_launcher import ProfileLauncher
from nbgpu.client.launchers.slurm_launcher import SlurmLauncher
from nbgpu.client.launchers.slurm_steps import StepLauncher, refuse_what_the_job_decides
from nbgpu.client.launchers.ssh_launcher import SshLauncher
from nbgpu.config import ClusterConfig
from nbgpu.machine.slurm_job import OwnJob


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
    if (job := config.own_job) is not None:
        refuse_what_the_job_decides(config, job)
        return StepLauncher(config, tell, job)
    if config.launcher == "slurm":
        return SlurmLauncher(config, tell)
    if config.ipython_profile:
        return ProfileLauncher(config, tell)
    return NoLauncher(config, tell)


def launcher_that_started(config: ClusterConfig, job: str, record: Mapping[str, Any]) -> Launcher:
    """Return the launcher that stands for the one which has started the hosts of a kept cluster.

    Args:
        config: the settings of the cluster.
        job: the launcher's `job`.
        record: what its `record` returned.
    """
    if number := record.get("own_job"):
        # This process may be in another job, or in none.
        launcher: Launcher = StepLauncher(config, print_at_once, OwnJob(number, config.num_hosts))
    elif config.launcher == "slurm":
        launcher = SlurmLauncher(config, print_at_once)
    else:
        launcher = launcher_of(config)
    launcher.take_over(job, record)
    return launcher
