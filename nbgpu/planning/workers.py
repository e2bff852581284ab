"""How many worker processes a rank's data gets, and why."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from nbgpu.config import TrainConfig

MAX_WORKERS = 4
"""Chosen by itself for a rank. More rarely help: then the disk is the bound, and each one holds memory."""
MIN_SHARED_BYTES = 256 * 1024**2
"""What workers decode passes through /dev/shm, which has 64 MiB in a container that nobody gave more."""


@dataclass(frozen=True)
class Workers:
    """Worker processes of each rank, and the reason in words."""

    count: int
    reason: str

    def in_words(self) -> str:
        """A sentence for a person."""
        if self.count == 0:
            return f"no worker processes: {self.reason}"
        return f"{self.count} worker process{'es' if self.count > 1 else ''} for each rank: {self.reason}"


@dataclass(frozen=True)
class HostResources:
    """What there is for all ranks of one host."""

    num_cores: int
    num_ranks: int
    shared_bytes: int | None
    """The size of /dev/shm; None where there is none."""


def workers_for(config: TrainConfig, host: HostResources) -> Workers:
    """How many processes read, decode, crop and augment for each rank."""
    if config.num_workers is not None:
        return Workers(config.num_workers, "as the settings say")
    if config.transforms_on == "gpu":
        return Workers(0, "transforms on the GPU run in a thread of the rank, which has the GPU")
    if config.dataset_kind == "smart":
        return Workers(0, "SmartCacheDataset decodes in threads of its own while a rank trains")
    if config.dataset_kind == "cache" and config.cache_rate == 1:
        return Workers(
            0, "all volumes are decoded in memory, and a thread crops and augments while a step computes"
        )
    if host.shared_bytes is not None and host.shared_bytes < MIN_SHARED_BYTES:
        return Workers(
            0,
            f"/dev/shm has {host.shared_bytes // 1024**2} MiB, and what workers decode passes through it; for "
            "workers give it at least 256 MiB (docker run --shm-size=1g)",
        )
    cores = f"{_count(host.num_cores, 'core')} for {_count(host.num_ranks, 'rank')} leave"
    num_left = host.num_cores // host.num_ranks - 1
    if num_left < 1:
        return Workers(0, f"{cores} none for workers")
    enough = f", of which {MAX_WORKERS} are enough" if num_left > MAX_WORKERS else ""
    return Workers(
        min(MAX_WORKERS, num_left),
        f"volumes are decoded during training, and {cores} {num_left} for each rank's workers{enough}",
    )


def workers_for_own(config: TrainConfig) -> Workers:
    """How many processes read for each rank where the dataset is the person's own, and may stand in memory whole."""
    if config.num_workers:
        return Workers(config.num_workers, "as the settings say")
    return Workers(0, "the rank reads its samples itself, between two steps; num_workers has them read ahead")


def this_host(world_size: int) -> HostResources:
    """What the ranks of this process's host share; under torchrun it says how many of them are here."""
    shared = Path("/dev/shm")
    return HostResources(
        len(os.sched_getaffinity(0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        shutil.disk_usage(shared).total if shared.is_dir() else None,
    )


def _count(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count != 1 else ''}"
