"""Trains small networks of this file's own on so many processes, and prints each run's losses over all ranks
by step.

    python regression.py NUM_RANKS '[[{"batch_size": 4, ...}, "group"], ...]' [FOLDER]

With FOLDER the runs' folders stay there, as 0, 1, 2, ..., so that later ones can go on from them (`resume`).
The samples of step s are always the same: rank r takes its share of them, whatever their number is.
REGRESSION_DEVICE=cuda:0 in the environment has all processes share that GPU, over gloo or, with
REGRESSION_BACKEND=nccl, over NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from nbgpu.config import TrainConfig
from nbgpu.engine import train
from nbgpu.engine.group import group
from nbgpu.engine.group.group import Membership
from nbgpu.engine.training.loop import RunContext
from nbgpu.engine.training.trainer import Trainer
from nbgpu.engine.workload.recipe import Batch, Loaders, Recipe
from nbgpu.machine import devices
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.records import Sample
from nbgpu.run_folder import resume
from nbgpu.run_folder.reader import Reader
from nbgpu.run_folder.recorder import Recorder

SAMPLES_PER_STEP = 8
NUM_SAMPLES = 40


class Regression:
    """A small 3D network that learns the mean square of random volumes. `norm` is 'group' or 'batch'."""

    def __init__(self, config: TrainConfig, norm: str = "group") -> None:
        self.config = config
        self.norm = norm

    def build_loaders(self, rank: int, world_size: int, device: torch.device) -> Loaders:
        epochs = _Epochs(self.config, rank, world_size)
        steps_per_epoch = NUM_SAMPLES // SAMPLES_PER_STEP
        return Loaders(train=epochs, val=[], steps_per_epoch=steps_per_epoch, seek=epochs.seek)

    def build_model(self) -> nn.Module:
        def block(channels_in: int, channels_out: int) -> nn.Sequential:
            norm = nn.BatchNorm3d(channels_out) if self.norm == "batch" else nn.GroupNorm(2, channels_out)
            return nn.Sequential(nn.Conv3d(channels_in, channels_out, 3, padding=1), norm, nn.SiLU())

        return nn.Sequential(block(1, 6), block(6, 8), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 1))

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return [model[0], model[1]]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (model(batch["image"]) - batch["target"]).square().mean()}

    def example(self, batch_size: int) -> Batch:
        return {"image": torch.zeros(batch_size, 1, 6, 6, 6), "target": torch.zeros(batch_size, 1)}

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)["loss"][None]}

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        return {}


class Contest(Regression):
    """The same network, which also deceives one that knows what true means look like, from the third step
    on."""

    def discriminator_first_step(self, steps_per_epoch: int) -> int:
        return 2

    discriminator_lr = 2e-2

    def build_discriminator(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def loss_against(
        self, discriminator: nn.Module, model: nn.Module, batch: Batch
    ) -> tuple[dict[str, Tensor], Any]:
        output = model(batch["image"])
        error = (output - batch["target"]).square().mean()
        deceived = (discriminator(output) - 1).square().mean()
        return {"loss": error + 0.1 * deceived, "deceived": deceived}, (output.detach(), batch["target"])

    def discriminator_loss(self, discriminator: nn.Module, seen: Any) -> Tensor:
        made, true = (discriminator(values) for values in seen)
        return (made.square().mean() + (true - 1).square().mean()) / 2


class _Epochs:
    def __init__(self, config: TrainConfig, rank: int, world_size: int) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        generator = torch.Generator().manual_seed(1)
        self._images = torch.randn(NUM_SAMPLES, 1, 6, 6, 6, generator=generator, dtype=torch.float64)
        self._targets = self._images.square().mean(dim=(1, 2, 3, 4))[:, None]
        self._first = 0

    def seek(self, step: int) -> None:
        self._first = step * SAMPLES_PER_STEP % NUM_SAMPLES

    def __iter__(self) -> Iterator[Batch]:
        size = self._config.batch_size
        begin, self._first = self._first, 0
        for first in range(begin, NUM_SAMPLES, SAMPLES_PER_STEP):
            for part in range(self._config.accumulate):
                own = first + (part * self._world_size + self._rank) * size
                yield {"image": self._images[own : own + size], "target": self._targets[own : own + size]}


def work(rank: int, world_size: int, folder: str, runs: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    torch.set_num_threads(1)
    device = torch.device(os.environ.get("REGRESSION_DEVICE", "cpu"))
    described = (
        devices.inventory()[:1] * world_size if device.type == "cuda" else map(devices.cpu, range(world_size))
    )
    of_ranks = tuple(described)
    backend = os.environ.get("REGRESSION_BACKEND", "gloo")
    member = Membership(rank, world_size, rank, device, backend)
    store = dist.FileStore(f"{folder}/meeting", member.world_size)  # type: ignore[attr-defined]
    group.form(member, store)
    for index, (settings, norm) in enumerate(runs):
        config = adapt_to_devices(TrainConfig.checked(**settings), of_ranks)
        run_folder = Path(folder, str(index))
        run_folder.mkdir(exist_ok=True)
        if rank == 0:
            resume.find(config).write(run_folder)
        recorder = Recorder(run_folder, rank)
        recipe: Recipe = Contest(config) if norm == "contest" else Regression(config, norm)
        context = RunContext(run_folder, member, of_ranks[rank], recorder)
        train.train(Trainer(config, recipe, context))
    torch.distributed.destroy_process_group()


def losses(folder: Path, num_ranks: int) -> list[float]:
    records, _ = Reader(folder, num_ranks, live=False).since()
    by_step: dict[int, list[float]] = {}
    for record in records:
        if isinstance(record, Sample) and "loss" in record.values:
            by_step.setdefault(record.step, []).append(record.values["loss"])
    return [sum(of_ranks) / len(of_ranks) for _, of_ranks in sorted(by_step.items())]


def main(num_ranks: int, runs: Sequence[tuple[Mapping[str, Any], str]], folder: str) -> None:
    if num_ranks == 1:
        work(0, 1, folder, runs)
    else:
        # Forked, as a cluster's engines are: a spawned one would import torch again, which takes longer
        # than it trains.
        multiprocessing.start_processes(
            work, (num_ranks, folder, runs), nprocs=num_ranks, start_method="fork"
        )
    print(json.dumps([losses(Path(folder, str(index)), num_ranks) for index in range(len(runs))]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(int(sys.argv[1]), json.loads(sys.argv[2]), *(sys.argv[3:] or [temporary]))
