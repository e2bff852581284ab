"""How a rank comes to train: called by the notebook's cluster, or started by torchrun.

torchrun --nproc-per-node=2 -m nbgpu.engine.train run.toml
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from nbgpu import devices, runs
from nbgpu.config import ClusterConfig, TrainConfig, read_toml
from nbgpu.engine import group
from nbgpu.engine.group import Membership
from nbgpu.engine.trainer import Trainer
from nbgpu.errors import ConfigError, NbgpuError
from nbgpu.records import Device, RunInfo, RunState
from nbgpu.telemetry import Recorder

if TYPE_CHECKING:
    from nbgpu.recipes import Recipe


def run_in_engine(folder: str) -> RunState:
    """Trains what `run.toml` in the folder says, on the engine's own process group."""
    cluster, config = read_toml(Path(folder) / "run.toml")
    member = group.membership()
    return train(config, Path(folder), member, devices.choose(cluster.gpus, member.world_size)[member.rank])


def train(config: TrainConfig, folder: Path, member: Membership, device: Device) -> RunState:
    """Trains on this rank, with the numbers recorded; every rank of the group calls it.

    Returns:
        'finished' or 'stopped'.

    Raises:
        Whatever stopped the training, after it was recorded as a 'failure' event.
    """
    info = _gather_info(config, folder, member, device)
    recorder = Recorder(folder, member.rank, _probe(device, member.device)) if config.telemetry else None
    try:
        with _own_randomness_and_threads(config):
            trainer = Trainer(config, _load_recipe(config), folder, member, info, recorder)
            try:
                return trainer.run()
            except BaseException as error:
                if recorder is not None:
                    recorder.event("failure", f"{type(error).__name__}: {error}", trainer.step)
                    recorder.state("failed", trainer.step)
                raise
    finally:
        if recorder is not None:
            recorder.close()


def _load_recipe(config: TrainConfig) -> Recipe:
    # By name, because recipes are built on the engine and not the other way round.
    recipe: Recipe = import_module("nbgpu.recipes").load(config)
    return recipe


def _gather_info(config: TrainConfig, folder: Path, member: Membership, device: Device) -> RunInfo:
    all_devices: list[Device | None] = [None] * member.world_size
    dist.all_gather_object(all_devices, device)
    return RunInfo(
        run_id=folder.name,
        recipe=config.recipe,
        devices=tuple(d for d in all_devices if d is not None),
        backend=member.backend,
        total_steps=config.steps,
        steps_per_epoch=0,
        batch_size=config.batch_size,
        global_batch_size=config.global_batch_size(member.world_size),
        started_s=time.time(),
    )


def _probe(device: Device, torch_device: torch.device) -> Callable[[], Mapping[str, float]]:
    """Measures this rank's memory and its device's utilization, on the recorder's thread."""
    utilization = devices.utilization_probe(device)
    if torch_device.type == "cpu":
        return utilization
    return lambda: {
        **utilization(),
        "memory_allocated_bytes": float(torch.cuda.memory_allocated(torch_device)),
        "memory_reserved_bytes": float(torch.cuda.memory_reserved(torch_device)),
    }


@contextmanager
def _own_randomness_and_threads(config: TrainConfig) -> Iterator[None]:
    """Gives the run seeded generators and its number of threads; the cells find theirs as they were."""
    python_state, numpy_state, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    random.seed(config.seed)
    np.random.seed(config.seed)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads(threads)


def main(arguments: list[str]) -> None:
    """Trains as one rank of torchrun, or alone where there is no torchrun.

    The argument is a run.toml, from a run's own folder or written by hand. The run gets a folder of its own
    under the settings' `runs_dir`, and rank 0 prints where.
    """
    if len(arguments) != 1:
        raise ConfigError("usage: torchrun --nproc-per-node=N -m nbgpu.engine.train run.toml")
    cluster, config = read_toml(Path(arguments[0]))
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = devices.choose(cluster.gpus, local_world_size)
    backend = devices.backend(cluster, chosen)
    device = chosen[local_rank]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(d.uuid for d in chosen if d.kind == "cuda"))
    torch.set_num_threads(cluster.threads_for(local_world_size))
    member = Membership(
        rank, world_size, local_rank, torch.device(devices.torch_name(device, chosen)), backend
    )
    with tempfile.TemporaryDirectory(prefix="nbgpu-") as rendezvous:
        group.form(member, None if world_size > 1 else Path(rendezvous))
        try:
            folder = _shared_folder(config, cluster, rank)
            state = train(config, folder, member, device)
        finally:
            dist.destroy_process_group()
    if rank == 0:
        print(f"{state}: {folder}")  # noqa: T201 - what the command is for


def _shared_folder(config: TrainConfig, cluster: ClusterConfig, rank: int) -> Path:
    """The run's folder, which rank 0 makes and the others are told."""
    name: list[str | None] = [str(runs.create(config, cluster)) if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    assert name[0] is not None
    return Path(name[0])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NbgpuError as error:
        sys.exit(f"{type(error).__name__}: {error}")
