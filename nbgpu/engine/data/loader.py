"""From volumes to batches: share them out, decode, cache, crop, augment and prefetch.

    find_volumes -> check_headers (volumes.py) -> hold_out -> SampleLoader

A SampleLoader needs three things of a recipe: items (decoding.py), the steps that decode one, and what a decoded
volume gives (sampling.py). Its other parts are planning/epochs.py (how the volumes come out over ranks and steps), datasets.py
(which of MONAI's datasets keeps them) and workers.py (processes that do the work ahead of time).

Everything is checked as early as it can be. Names, headers and file sizes are read for every file before
training; voxels (NaN, a constant volume, damage inside the compressed data) when a volume is decoded, which
for the cached ones is before training too. A volume that is decoded later and turns out to be bad ends the
run at that step with a DataError that names it: it is never skipped, because ranks that skip different
volumes train on something that nobody asked for.

All randomness comes from (seed, rank, epoch), and within an epoch from the number of the visit to a volume. Neither
the global random states nor the timing of threads and processes have any influence, and neither has the dataset or
the number of workers: the same settings give the same batches to the last bit. Only SmartCacheDataset has epochs of
its own, because it changes what they are made of.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from monai.data import IterableDataset, ShuffleBuffer, ThreadDataLoader, partition_dataset
from monai.transforms import Compose
from torch import Tensor
from torch.nn.functional import avg_pool3d
from torch.utils.data import default_collate

from nbgpu.config import TrainConfig
from nbgpu.engine.data import workers as data_workers
from nbgpu.engine.data.datasets import Shard
from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.sampling import Draw, Sample
from nbgpu.engine.data.workers import Visit, Visits, WorkerProcesses
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders
from nbgpu.planning import workers
from nbgpu.planning.epochs import epoch_of

_NUM_VOLUMES_MIXED = 4
"""Samples of so many volumes are mixed into batches."""
_POLL_PERIOD_S = 0.1
"""How often the loader's thread looks whether it is to end while there is no room for more batches. MONAI's default is 10 ms:
each look takes the interpreter from the step for a moment, which added up to 2 % of all time."""

# ---- sharing out ---------------------------------------------------------------------------------------


def hold_out(items: Sequence[Item], fraction: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(training, held out): a random share of whole volumes, at least one of each where `fraction` > 0."""
    if fraction == 0 or len(items) < 2:
        return list(items), []
    num_held_out = min(max(1, round(fraction * len(items))), len(items) - 1)
    order = np.random.RandomState(seed).permutation(len(items))
    held_out = set(order[:num_held_out].tolist())
    return (
        [item for i, item in enumerate(items) if i not in held_out],
        [items[i] for i in sorted(held_out)],
    )


def shard(items: Sequence[Item], rank: int, world_size: int, seed: int, padded: bool) -> list[Item]:
    """The rank's volumes. `epochs.epoch_of` says how many they are.

    With `padded` all ranks get as many, and the first ones are used twice to even it out; without, each volume is on
    one rank. With fewer volumes than ranks each rank takes all of them, and its own random samples.
    """
    if len(items) < world_size:
        return list(items)
    parts: list[list[Item]] = partition_dataset(
        items, num_partitions=world_size, shuffle=True, seed=seed, even_divisible=padded
    )
    return parts[rank]


# ---- batches -------------------------------------------------------------------------------------------


class SampleLoader:
    """Batches of one rank, one epoch each time that it is iterated.

    An epoch visits every volume of the rank (with SmartCacheDataset: every cached one) and takes what `draw` makes of
    it; samples of about four volumes are mixed. It has exactly `steps_per_epoch * accumulate` batches: the samples'
    tensors by name, stacked to (batch_size, ...).

    A thread makes batches while one is trained on, or collects what worker processes have made. It ends with the
    iteration, also when that is left in the middle, and `close` ends all of them in any case.

    Args:
        items: all volumes that are trained on, on all ranks.
        steps: takes an Item to its decoded volume: tensors by name, at least those that `draw` needs. Its steps are
            kept by PersistentDataset and sent to worker processes as a pickle, so that they should have no other
            fields than what they need.
        draw: what one volume gives in an epoch.
        config: the run's settings.
        rank, world_size: which share.
        device: the rank's.

    Raises:
        DataError: all the bad files among those that are cached.
    """

    def __init__(
        self,
        items: Sequence[Item],
        steps: Compose,
        draw: Draw,
        config: TrainConfig,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = CPU,
    ) -> None:
        self._config = config
        self._rank = rank
        self._draw = draw
        self._epoch = 0
        self._num_samples_to_skip = 0
        self._epoch_in_cache = 0
        self._batches: Generator[Any, None, None] | None = None
        self._pool: WorkerProcesses | None = None

        epoch = epoch_of(config, len(items), draw.samples_per_volume, world_size)
        self.steps_per_epoch = epoch.num_steps
        self._num_samples = epoch.num_steps * config.accumulate * config.batch_size
        self._workers = workers.workers_for(config, workers.this_host(world_size))
        self.told = (*epoch.words, self._workers.in_words())
        self.warnings = tuple(_warnings(config, device))
        if config.transforms_on == "gpu":
            draw.on(device)
        self._pinned = device.type == "cuda" and config.transforms_on == "cpu" and config.pin_memory != "off"
        if self._workers.count:
            # Its imports take seconds, in which the cache is filled.
            modules = {type(step).__module__ for step in steps.flatten().transforms} - {"__main__"}
            self._context = data_workers.prepare(modules)
        names = hashlib.blake2b("\n".join(str(item["name"]) for item in items).encode(), digest_size=16)
        self._identity = {
            "length": len(items),
            "samples": {"a name": names.hexdigest()},
            "advice": "All ranks must see the same files: they were perhaps added or removed while the run began",
        }
        self._shard = Shard(
            shard(items, rank, world_size, config.seed, padded=config.shards == "padded"),
            steps,
            config,
            num_cached=epoch.num_cached[rank],
            num_replaced=epoch.num_replaced[rank],
            seed=config.seed,
        )

    def loaders(self, val: Iterable[Batch]) -> Loaders:
        """This, with the rank's held-out batches, as a recipe gives them to the Trainer."""
        return Loaders(
            train=self,
            val=val,
            steps_per_epoch=self.steps_per_epoch,
            seek=self.seek,
            next_epoch=self.next_epoch,
            close=self.close,
            told=self.told,
            warnings=self.warnings,
            identity=lambda: {"the list of volumes": self._identity},
        )

    def names(self) -> list[str]:
        """The volumes that an epoch uses now: with SmartCacheDataset those in its cache."""
        return [str(self._shard[index]["name"]) for index in range(len(self._shard))]

    def __iter__(self) -> Iterator[Batch]:
        self._end_iteration()
        loader = ThreadDataLoader(
            IterableDataset(_errors_as_items(self._samples(self._epoch, self._num_samples_to_skip))),  # type: ignore[arg-type]
            buffer_size=self._config.prefetch,
            buffer_timeout=_POLL_PERIOD_S,
            batch_size=self._config.batch_size,
            collate_fn=self._collate,
            # its own: the default one is shared with the model's random numbers
            generator=torch.Generator().manual_seed(self._config.seed),
        )
        self._epoch += 1
        self._num_samples_to_skip = 0
        batches = self._batches = iter(loader)
        try:
            for batch in batches:
                if isinstance(batch, Exception):
                    raise batch
                yield batch
        finally:
            batches.close()  # waits for the thread

    def next_epoch(self) -> None:
        """Puts the volumes into the cache that SmartCacheDataset has decoded meanwhile."""
        self._end_iteration()
        self._shard.next_epoch()
        self._epoch_in_cache += 1

    def seek(self, step: int) -> None:
        """The next iteration begins with the batches of this optimizer step, counted from 0 over all epochs.

        It gives what an iteration from the first step on would give there.
        """
        self._end_iteration()
        self._epoch, steps = divmod(step, self.steps_per_epoch)
        self._num_samples_to_skip = steps * self._config.accumulate * self._config.batch_size
        if self._epoch_in_cache != self._epoch:
            self._shard.go_to(self._epoch)
            self._epoch_in_cache = self._epoch

    def close(self) -> None:
        """Ends threads and processes; may be called more than once."""
        self._end_iteration()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._shard.close()

    def _end_iteration(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _samples(self, epoch: int, num_to_skip: int) -> Iterator[Sample]:
        """The samples of an epoch, in order, but for the first ones. Only volumes that are still needed are visited."""
        visits, order = self._plan(epoch)
        order = order[num_to_skip:]
        num_wanted = Counter(number for number, _ in order)
        waiting: dict[int, list[Sample]] = {}
        arriving = self._visited([visit for visit in visits if num_wanted[visit.number]])
        for number, index in order:
            while number not in waiting:
                visit, samples = next(arriving)
                waiting[visit.number] = samples
            yield waiting[number][index]
            num_wanted[number] -= 1
            if not num_wanted[number]:
                del waiting[number]
        for _ in arriving:  # its end
            raise AssertionError("a visit was made for nothing")

    def _plan(self, epoch: int) -> tuple[list[Visit], list[tuple[int, int]]]:
        """(the visits, the order of the samples as (number of the visit, index in it)) of an epoch."""
        seeds = np.random.SeedSequence([self._config.seed, self._rank, epoch]).generate_state(2)
        order_seed, mix_seed = (int(seed) for seed in seeds)
        per_volume = self._draw.samples_per_volume
        num_visits = -(-self._num_samples // per_volume)
        rng = np.random.RandomState(order_seed)
        visits: list[Visit] = []
        while len(visits) < num_visits:  # the last round may be cut off
            for volume in rng.permutation(len(self._shard)).tolist():
                visits.append(Visit(volume, epoch, len(visits)))
        # Cut off before they are mixed: afterwards, volumes of a second round could push out some of the first.
        samples = [(v.number, index) for v in visits[:num_visits] for index in range(per_volume)]
        mixed = ShuffleBuffer(
            samples[: self._num_samples],
            buffer_size=_NUM_VOLUMES_MIXED * per_volume,
            seed=mix_seed % 2**31,
        )
        return visits[:num_visits], list(mixed)

    def _visited(self, visits: list[Visit]) -> Iterator[tuple[Visit, list[Sample]]]:
        """Each visit with its samples, made in this thread or by the worker processes."""
        if not self._workers.count:
            here = Visits(self._shard, self._draw, self._config.seed, self._rank)
            yield from ((visit, here[visit]) for visit in visits)
            return
        if self._pool is None:
            self._pool = WorkerProcesses(
                Visits(self._shard.portable(), self._draw, self._config.seed, self._rank),
                self._context,
                num_workers=self._workers.count,
                prefetch=self._config.prefetch,
                stay=not self._shard.is_replacing and self._config.persistent_workers != "off",
                rank=self._rank,
            )
        yield from zip(visits, self._pool.samples_of(visits), strict=True)
        if self._shard.is_replacing:
            # The next epoch's workers get the next epoch's volumes.
            self._pool.close()
            self._pool = None

    def _collate(self, samples: list[Sample | Exception]) -> Batch | Exception:
        for sample in samples:
            if isinstance(sample, Exception):
                return sample
        batch: dict[str, Tensor] = default_collate(samples)
        return {name: value.pin_memory() for name, value in batch.items()} if self._pinned else batch


def _warnings(config: TrainConfig, device: torch.device) -> Iterator[str]:
    if device.type == "cuda":
        return
    if config.pin_memory == "on":
        yield "pin_memory='on' does nothing: the ranks have no GPU, and pinned memory is what a GPU reads faster"
    if config.transforms_on == "gpu":
        yield "transforms_on='gpu' runs on the CPU: the ranks have no GPU"


def _errors_as_items(samples: Iterator[Sample]) -> Iterator[Sample | Exception]:
    """The samples, and an exception as the last item: MONAI's prefetching thread would die of it and leave
    the epoch looking finished."""
    try:
        yield from samples
    except Exception as error:  # noqa: BLE001  SampleLoader raises it in the consumer's thread
        yield error


# ---- held-out patches ----------------------------------------------------------------------------------


def grid_patches(image: Tensor, patch_size: int, max_patches: int, min_foreground: float = 0.5) -> Tensor:
    """Patches of a decoded volume (C, D, H, W) on a grid, always the same: (N, C, p, p, p), N >= 1.

    The grid is centred, and its cells overlap by half. Taken are those in which at least the share
    `min_foreground` of the voxels is brighter than the volume's mean, or, where there is none, the one with
    the largest share; of more than `max_patches` an evenly spaced choice.
    """
    p = patch_size
    stride = max(1, p // 2)
    starts = [(n - p) % stride // 2 for n in image.shape[1:]]
    bright = (image > image.mean()).float()[(slice(None), *(slice(start, None) for start in starts))]
    foreground = avg_pool3d(bright[None], p, stride)[0].mean(dim=0)
    cells = (foreground >= min(min_foreground, float(foreground.max()))).nonzero()
    if len(cells) > max_patches:
        evenly = torch.linspace(0, len(cells) - 1, max_patches, dtype=torch.float32, device="cpu")
        cells = cells[evenly.round().long()]
    corners = (cells * stride + torch.tensor(starts, dtype=torch.int64, device="cpu")).tolist()
    return torch.stack([image[:, x : x + p, y : y + p, z : z + p] for x, y, z in corners])
