"""Where the trials of a sweep train on other hosts: each in a cluster of its own, on one host where ssh gives
the hosts, and in a job of its own with Slurm, or in the job that the notebook is in."""

from __future__ import annotations

from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.machine.slurm_job import NEW_JOB


def places(cluster: ClusterConfig, parallel: int | None) -> list[ClusterConfig]:
    """The settings of each cluster that can train a trial at the same time as the others; host by host in
    turn, so that the hosts share the trials evenly.

    Args:
        cluster: the settings of the sweep, whose `gpus_per_node` is the number of a trial's ranks on a host.
        parallel: the number of clusters; None for one job, or as many as the hosts have room for as far as
            the settings tell.

    Raises:
        ConfigError: there is no room for so many.
    """
    if (job := cluster.launcher_settings.own_job) is not None and (parallel or 1) > 1:
        raise ConfigError(
            f"parallel={parallel}: this notebook is in Slurm's job {job.number}, whose nodes train one trial at a time. Leave "
            f"it out, or launcher_options={{{NEW_JOB!r}: True}} gives each trial a job of its own"
        )
    if cluster.launcher_settings.IS_JOB:
        return [cluster] * (parallel or 1)
    hosts, groups = cluster.host_names, _groups(cluster)
    room = len(hosts) * len(groups)
    if parallel is not None and parallel > room and cluster.gpus != "none":
        raise ConfigError(
            f"parallel={parallel}: the hosts have room for {room} trials of gpus_per_node={cluster.gpus_per_node}, as far as "
            "the settings tell. To have several trials on a host, name its GPUs: gpus='0,1,2,3' with gpus_per_node=1"
        )
    return [
        cluster.model_copy(
            update={
                "hosts": hosts[place % len(hosts)],
                "gpus": groups[place // len(hosts) % len(groups)],
            }
        )
        for place in range(parallel or room)
    ]


def _groups(cluster: ClusterConfig) -> list[str]:
    """The `gpus` of each place on one host."""
    if cluster.gpus in (gpus_setting.ALL, gpus_setting.NONE) or gpus_setting.takes_free(cluster.gpus):
        return [cluster.gpus]
    names, size = cluster.gpus.split(","), cluster.gpus_per_node or 1
    if len(names) < size:
        raise ConfigError(f"gpus={cluster.gpus!r} names fewer GPUs than gpus_per_node={size}")
    return [",".join(names[begin : begin + size]) for begin in range(0, len(names) - size + 1, size)]
