"""The number of worker processes that load the data of a rank, with the reason for the number."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from nbgpu.config import TrainConfig
from nbgpu.machine import numa
from nbgpu.machine.cgroups import cpu_quota
from nbgpu.text.ranks import count_of_ranks

MAX_WORKERS = 4
"""The most workers that are chosen automatically for a rank. More rarely help, because the disk becomes the
limit, and each worker takes memory."""
MIN_SHARED_BYTES = 256 * 1024**2
"""The least size of /dev/shm, through which workers send decoded volumes to their rank. In a container it has
64 MiB by default."""


@dataclass(frozen=True)
class Workers:
    """The number of worker processes of each rank, and the reason as a phrase."""

    count: int
    reason: str

    def in_words(self) -> str:
        """Return a sentence for the user."""
        if self.count == 0:
            return f"no worker processes: {self.reason}"
        return f"{self.count} worker process{'es' if self.count > 1 else ''} for each rank: {self.reason}"


@dataclass(frozen=True)
class HostResources:
    """The resources of a host that its ranks share."""

    num_cores: int
    num_ranks: int
    shared_bytes: int | None
    """The size of /dev/shm; None where there is none."""


def workers_for(config: TrainConfig, host: HostResources) -> Workers:
    """Choose the number of worker processes that read, decode, crop and augment volumes for each rank."""
    if config.num_workers is not None:
        return Workers(config.num_workers, "as the settings say")
    if config.transforms_on == "gpu":
        return Workers(0, "transforms on the GPU run in a thread of the rank, which has the GPU")
    if config.dataset_kind == "smart":
        return Workers(0, "SmartCacheDataset decodes in threads of its own while a rank trains")
    if config.dataset_kind == "cache" and config.cache_rate == 1:
        return Workers(
            0,
            f"all {config.VOLUME}s are decoded in memory, and a thread crops and augments while a step computes",
        )
    if host.shared_bytes is not None and host.shared_bytes < MIN_SHARED_BYTES:
        return Workers(
            0,
            f"/dev/shm has {host.shared_bytes // 1024**2} MiB, and what workers decode passes through it; for "
            "workers give it at least 256 MiB (docker run --shm-size=1g)",
        )
    plural = "s" if host.num_cores != 1 else ""
    cores = f"{host.num_cores} core{plural} for {count_of_ranks(host.num_ranks)} leave"
    num_left = host.num_cores // host.num_ranks - 1
    if num_left < 1:
        return Workers(0, f"{cores} none for workers")
    enough = f", of which {MAX_WORKERS} are enough" if num_left > MAX_WORKERS else ""
    return Workers(
        min(MAX_WORKERS, num_left),
        f"{config.VOLUME}s are decoded during training, and {cores} {num_left} for each rank's workers{enough}",
    )


def workers_for_own(config: TrainConfig) -> Workers:
    """Return the number of worker processes for a user's own dataset: none if the setting num_workers is left
    out, because the samples may already be in memory."""
    if config.num_workers:
        return Workers(config.num_workers, "as the settings say")
    return Workers(0, "the rank reads its samples itself, between two steps; num_workers has them read ahead")


def this_host(world_size: int) -> HostResources:
    """Return the resources of this process's host.

    Args:
        world_size: the number of ranks. Under torchrun, LOCAL_WORLD_SIZE has the number of ranks on the host.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    # A rank that is bound to the NUMA node of its GPU shares the cores of the node with the other ranks
    # there. Where the CPU quota of a container leaves fewer cores for each rank, the quota counts.
    shares = [(len(os.sched_getaffinity(0)), numa.num_ranks_on_cores() or num_ranks)]
    if (quota := cpu_quota()) is not None:
        shares.append((max(1, int(quota)), num_ranks))
    num_cores, num_sharing = min(shares, key=lambda share: share[0] / share[1])
    shared = Path("/dev/shm")
    return HostResources(num_cores, num_sharing, shutil.disk_usage(shared).total if shared.is_dir() else None)
