"""Starts new sweeps, and resumes earlier ones.

For editors and type checkers the parameters are in `starting.pyi`, which docs/generate_stub.py writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbgpu.client.cluster.cluster import Cluster, cluster_with
from nbgpu.client.host import gpu_choice, registry
from nbgpu.client.sweeps.sweep import Sweep
from nbgpu.config import ClusterConfig, TrainConfig, signatures
from nbgpu.config.cluster import MAX_RANKS
from nbgpu.errors import ConfigError, NoFreeGpuError
from nbgpu.machine import devices
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.machine.slurm_job import NEW_JOB
from nbgpu.planning import host_devices, trials
from nbgpu.protocol.records import Device
from nbgpu.run_folder import resume


@signatures.lists_settings
def sweep(recipe: str | None = None, /, **settings: Any) -> Sweep:
    """Train a recipe with many settings. Returns at once.

    nbgpu.sweep("autoencoder", lr=[1e-4, 1e-3], seed=[0, 1])                       # every combination
    nbgpu.sweep("autoencoder", lr="1e-5..1e-2:log", batch_size=[2, 4], random=20)   # 20 random ones
    nbgpu.sweep(resume="nbgpu_runs/20260101-120000-sweep-autoencoder-1f2e")         # the trials that are left

    Args:
        recipe: the recipe to train; left out with `resume`.
        settings: settings of the recipe. A list gives a trial for each value. From a range (a text,
            'LOW..HIGH' or 'LOW..HIGH:log') numbers are drawn with `random`. Everything else is the same for
            all trials. Other keywords are `preset`, the name of values for the settings that are not given,
            `random`, `random_seed`, `parallel`, `sort_by`, `goal`, and the cluster's settings. The defaults
            of `ranks`, and of `gpus_per_node` on other hosts, are 1. Without a recipe, `resume` is the folder
            of a sweep.

    Raises:
        ConfigError: something is not valid. The message names every combination that cannot run, and nothing
            was started.
        ClusterError: a GPU is in use by a cluster.
        RunError: the sweep to resume is running in another process.
    """
    return go_on(**settings) if recipe is None else begin(recipe, settings)


def begin(recipe: str, settings: Mapping[str, Any]) -> Sweep:
    """Plan a new sweep, check the settings of every trial against its devices, and start it. Raises the
    errors of `sweep`."""
    plan = trials.plan(recipe, settings)
    clusters = _clusters(plan)
    plan = trials.checked(plan, _devices(clusters), _require_checkpoint_that_fits)
    _require_free(clusters)
    return Sweep(trials.create_folder(plan), plan, clusters)


def go_on(resume: str | Path = "", **settings: Any) -> Sweep:
    """Resume a sweep: read its plan from its folder, and start the trials that are not finished. Raises the
    errors of `sweep`."""
    if not resume:
        raise ConfigError(
            "name a recipe: nbgpu.sweep('autoencoder', lr=[1e-4, 1e-3]), or resume=FOLDER of a sweep"
        )
    folder = Path(resume).absolute()
    plan = trials.SweepPlan.read(folder, **settings)
    clusters = _clusters(plan)
    plan = trials.checked(plan, _devices(clusters))
    _require_free(clusters)
    return Sweep(folder, plan, clusters)


def _require_checkpoint_that_fits(config: TrainConfig) -> None:
    # With 'auto' a trial resumes from its newest checkpoint, and a new trial has none.
    if config.resume != resume.AUTO:
        resume.find(config, check_sha256=False)


def _clusters(plan: trials.SweepPlan) -> list[Cluster]:
    """Make a cluster for each place of the sweep (`sweep.py`), without starting it."""
    if not plan.cluster.is_local:
        return [cluster_with(config) for config in places_on_hosts(plan.cluster, plan.config.parallel)]
    gpus_of_places = places(plan.cluster, plan.config.parallel)
    num_ranks = plan.cluster.ranks or 1
    settings = {
        **plan.cluster.model_dump(),
        "ranks": num_ranks,
        # The ranks of all trials that train side by side share the cores.
        "threads_per_rank": plan.cluster.threads_for(len(gpus_of_places) * num_ranks),
        # `places` has waited for GPUs already.
        "wait": False,
    }
    return [Cluster(**{**settings, "gpus": gpus}) for gpus in gpus_of_places]


def _devices(clusters: Sequence[Cluster]) -> list[Sequence[Device]]:
    return [cluster.devices or host_devices.assumed_devices(cluster.config) for cluster in clusters]


def places(cluster: ClusterConfig, parallel: int | None) -> list[str]:
    """Return the setting `gpus` of each place of a sweep on this host.

    Args:
        cluster: the settings with the GPUs to use and the number of ranks of a trial.
        parallel: the number of places; None for as many as there are GPUs for, or without GPUs for 2 CPU
            ranks in all.

    Raises:
        ConfigError: there are not enough GPUs, and they are not to be shared.
        NoFreeGpuError: no GPU is free.
    """
    num_ranks = cluster.ranks or 1
    gpus = _gpus_waited_for(cluster, parallel) if cluster.wait else _free_gpus(cluster)
    if not gpus:
        return ["none"] * (parallel or max(1, devices.DEFAULT_CPU_RANKS // num_ranks))
    num_places = parallel or max(1, len(gpus) // num_ranks)
    if not cluster.share_gpus:
        _require_enough(num_places, num_ranks, len(gpus))
    taken = [
        [gpus[(place * num_ranks + rank) % len(gpus)].uuid for rank in range(num_ranks)]
        for place in range(num_places)
    ]
    return [",".join(dict.fromkeys(uuids)) for uuids in taken]


def _free_gpus(cluster: ClusterConfig) -> list[Device]:
    """Return the GPUs that the settings choose among those that are free now; an empty list on a host without
    GPUs."""
    return [device for device in gpu_choice.choose(cluster.changed(ranks=None)) if device.kind == "cuda"]


def _gpus_waited_for(cluster: ClusterConfig, parallel: int | None) -> list[Device]:
    """Wait until there are enough free GPUs for `parallel` places, and return them. Without `parallel`, wait
    until there are enough for one place, and return all that are free then. Return an empty list on a host
    without GPUs.

    Raises:
        ConfigError: the places need more GPUs than the host has, or than gpus='free:N' allows.
    """
    num_ranks = cluster.ranks or 1
    # The wait would never end if there are fewer GPUs.
    if most_gpus := cluster.most_free_gpus or len(devices.inventory()):
        _require_enough(parallel or 1, num_ranks, most_gpus)
    waited_for = gpu_choice.wait(cluster.changed(ranks=min(MAX_RANKS, (parallel or 1) * num_ranks)))
    gpus = [device for device in dict.fromkeys(waited_for) if device.kind == "cuda"]
    if parallel is not None:
        return gpus
    # Another user may have taken some of those that are free by now: then those that were waited for count.
    with suppress(NoFreeGpuError):
        gpus = max(gpus, _free_gpus(cluster), key=len)
    return gpus


def _require_enough(num_places: int, num_ranks: int, num_gpus: int) -> None:
    """Raise ConfigError if several places need more GPUs than there are."""
    if num_places > 1 and num_places * num_ranks > num_gpus:
        raise ConfigError(
            f"parallel={num_places} with ranks={num_ranks} takes {num_places * num_ranks} GPUs, and there are {num_gpus}. "
            "Give less, or share_gpus=True to have several trials on one GPU"
        )


def _require_free(clusters: Sequence[Cluster]) -> None:
    if not clusters[0].config.share_gpus:
        registry.require_free([device for cluster in clusters for device in cluster.devices])


def places_on_hosts(cluster: ClusterConfig, parallel: int | None) -> list[ClusterConfig]:
    """Return the settings of the cluster of each place of a sweep on other hosts. Successive places are on
    different hosts, so that the hosts have equally many.

    Args:
        cluster: the settings of the sweep, whose `gpus_per_node` is the number of a trial's ranks on a host.
        parallel: the number of places; None for one job, or for as many as the hosts have room for by the
            settings.

    Raises:
        ConfigError: the hosts have no room for so many.
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
    """Return the setting `gpus` of each place on one host. GPUs that are not listed by name, such as 'all',
    are not divided, so that the host has one place."""
    if cluster.gpus in (gpus_setting.ALL, gpus_setting.NONE) or gpus_setting.takes_free(cluster.gpus):
        return [cluster.gpus]
    names, size = cluster.gpus.split(","), cluster.gpus_per_node or 1
    if len(names) < size:
        raise ConfigError(f"gpus={cluster.gpus!r} names fewer GPUs than gpus_per_node={size}")
    return [",".join(names[begin : begin + size]) for begin in range(0, len(names) - size + 1, size)]
