"""Makes a rank's batches from volumes: distribute over ranks, decode, cache, crop, augment and prefetch.

    find_volumes (planning/volume_files.py) -> check_headers (volumes.py) -> split (parts.py) -> SampleLoader

A SampleLoader needs three things of a recipe: items (decoding.py), the steps that decode one, and what a
decoded volume gives (sampling.py). Its other parts are planning/epochs.py (how volumes are divided over ranks
and steps), spreading.py (rare volumes, evenly over ranks and micro-batches), datasets.py (which of MONAI's
datasets holds them) and workers.py (processes that work ahead).

Everything is checked as early as possible. Names, headers and file sizes are read for every file before
training; voxels (NaN, a constant volume, damage inside the compressed data) when a volume is decoded, which
for the cached ones is before training too. A bad volume that is decoded later ends the run at that step with
a DataError that names it. It is never skipped: if ranks skipped different volumes, the person would not know
which data the model was trained on.

All randomness comes from (seed, rank, epoch), and within an epoch from the number of the visit to a volume.
Global random states, the timing of threads and processes, the dataset, and the number of workers have no
influence: the same settings give the same batches to the last bit. Only SmartCacheDataset has other epochs,
because it changes the volumes that an epoch uses.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
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
from nbgpu.engine.data.parts import Parts
from nbgpu.engine.data.sampling import Draw, Sample
from nbgpu.engine.data.spreading import balanced_shares, draw_visits, micro_batches_of_rare, num_rare_visits
from nbgpu.engine.data.workers import Visit, Visits, WorkerProcesses
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders
from nbgpu.planning import workers
from nbgpu.planning.epochs import epoch_of

_NUM_VOLUMES_MIXED = 4
"""The number of volumes whose samples are shuffled together, in a buffer of their size."""
_POLL_PERIOD_S = 0.1
"""How often the loader's thread checks whether it should end while there is no room for more batches.

MONAI's default is 10 ms, and each check takes the GIL from the step for a moment, which added up to 2 % of
all time."""

# ---- shards --------------------------------------------------------------------------------------------


def shard(items: Sequence[Item], rank: int, world_size: int, seed: int, padded: bool) -> list[Item]:
    """Return the rank's volumes, whose number `epochs.epoch_of` gives.

    With `padded` all ranks get the same number, for which some volumes, chosen by the seed, are on two ranks;
    without it each volume is on one rank. With fewer volumes than ranks each rank takes all volumes, and its
    own random samples of them.
    """
    if len(items) < world_size:
        return list(items)
    parts: list[list[Item]] = partition_dataset(
        items, num_partitions=world_size, shuffle=True, seed=seed, even_divisible=padded
    )
    return parts[rank]


@dataclass(frozen=True)
class _Rare:
    """The rare volumes, which are spread evenly over the micro-batches."""

    is_rare: Sequence[bool]
    """Whether each volume of this rank is rare."""
    num_visits: Sequence[int]
    """For each rank its number of visits to rare volumes in an epoch."""

    @classmethod
    def of(cls, shares: Sequence[Sequence[bool]], rank: int, num_samples: int) -> _Rare:
        """Compute the number of rare volumes that each rank visits in an epoch.

        Args:
            shares: for each rank, whether each of its volumes is rare.
            rank: this rank.
            num_samples: the samples of an epoch on each rank; each visit gives one.
        """
        return cls(shares[rank], [num_rare_visits(sum(share), len(share), num_samples) for share in shares])


# ---- batches -------------------------------------------------------------------------------------------


class SampleLoader:
    """The batches of one rank; each iteration is one epoch.

    An epoch visits every volume of the rank (with SmartCacheDataset every cached volume) and takes the
    samples that `draw` makes of it; samples of about four volumes are mixed. An epoch has exactly
    `steps_per_epoch * accumulate` batches: the samples' tensors by name, stacked to (batch_size, ...).

    A thread makes batches during training, or collects those of worker processes. It ends with the iteration,
    even one that is left midway; `close` ends all threads and processes in any case.

    Args:
        parts: the volumes of all ranks. Those of the training part are loaded; `summary` counts the others.
        steps: decodes an Item into tensors by name, at least those that `draw` needs. PersistentDataset and
            worker processes get its steps as a pickle, so that the steps should have no fields that they do
            not need.
        draw: makes the samples of one visit to a volume.
        config: the run's settings.
        rank, world_size: the rank, and the number of ranks.
        device: the rank's.
        is_rare: tells which volumes are spread evenly over the ranks and, where no volumes are replaced, over
            the micro-batches of an epoch; None to draw all alike. Such volumes give one sample each.

    Raises:
        DataError: with all bad files among the cached volumes.
    """

    def __init__(
        self,
        parts: Parts,
        steps: Compose,
        draw: Draw,
        config: TrainConfig,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = CPU,
        is_rare: Callable[[Item], bool] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._draw = draw
        self._epoch = 0
        self._num_samples_to_skip = 0
        self._epoch_in_cache = 0
        self._batches: Generator[Any, None, None] | None = None
        self._pool: WorkerProcesses | None = None

        items = parts.training
        epoch = epoch_of(config, parts.amount(draw.samples_per_volume), world_size)
        self.steps_per_epoch = epoch.num_steps
        self._num_samples = epoch.num_steps * config.accumulate * config.batch_size
        self._workers = workers.workers_for(config, workers.this_host(world_size))
        self.summary = (*epoch.words, self._workers.in_words())
        if config.transforms_on == "gpu":
            draw.on(device)
        self._pinned = device.type == "cuda" and config.transforms_on == "cpu" and config.pin_memory != "off"
        if self._workers.count:
            # The forkserver's imports take seconds, during which the cache is filled.
            modules = {type(step).__module__ for step in steps.flatten().transforms} - {"__main__"}
            self._context = data_workers.prepare(modules)
        names = hashlib.blake2b("\n".join(str(item["name"]) for item in items).encode(), digest_size=16)
        self._identity = {
            "length": len(items),
            "samples": {"a name": names.hexdigest()},
            "advice": "All ranks must see the same files: they were perhaps added or removed while the run began",
        }
        volumes = shard(items, rank, world_size, config.seed, padded=config.shards == "padded")
        self._rare: _Rare | None = None
        if is_rare is not None:
            assert draw.samples_per_volume == 1, "a micro-batch has whole visits"
            shares = [volumes] * world_size
            if len(items) >= world_size:
                rare = [is_rare(item) for item in items]
                shares = balanced_shares(
                    items, rare, world_size, config.seed, padded=config.shards == "padded"
                )
                volumes = shares[rank]
            if not any(epoch.num_replaced):
                self._rare = _Rare.of(
                    [[is_rare(item) for item in share] for share in shares], rank, self._num_samples
                )
        self._shard = Shard(
            volumes,
            steps,
            config,
            num_cached=epoch.num_cached[rank],
            num_replaced=epoch.num_replaced[rank],
            seed=config.seed,
        )

    def loaders(self, val: Iterable[Batch]) -> Loaders:
        """Return this loader and the rank's held-out batches, as a recipe gives them to the Trainer."""
        return Loaders(
            train=self,
            val=val,
            steps_per_epoch=self.steps_per_epoch,
            seek=self.seek,
            next_epoch=self.next_epoch,
            close=self.close,
            summary=self.summary,
            identity=lambda: {f"the list of {self._config.VOLUME}s": self._identity},
            cached_bytes=self._shard.cached_bytes,
        )

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches in an epoch. A micro-batch has a part on every rank."""
        return self.steps_per_epoch * self._config.accumulate

    @property
    def num_rare_samples(self) -> int | None:
        """Return the number of rare samples that an epoch spreads over the micro-batches of all ranks; None
        if it spreads none."""
        return None if self._rare is None else sum(self._rare.num_visits)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, made by a thread that works `prefetch` batches ahead."""
        self._end_iteration()
        loader = ThreadDataLoader(
            IterableDataset(_errors_as_items(self._samples(self._epoch, self._num_samples_to_skip))),  # type: ignore[arg-type]
            buffer_size=self._config.prefetch,
            buffer_timeout=_POLL_PERIOD_S,
            batch_size=self._config.batch_size,
            collate_fn=self._collate,
            # its own, because the default one is shared with the model's random numbers
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
        """Put into the cache the volumes that SmartCacheDataset has decoded in the background."""
        self._end_iteration()
        self._shard.next_epoch()
        self._epoch_in_cache += 1

    def seek(self, step: int) -> None:
        """Make the next iteration begin with the batches of this optimizer step, counted from 0 over all
        epochs.

        They are the same batches as in an iteration from the first step on.
        """
        self._end_iteration()
        self._epoch, steps = divmod(step, self.steps_per_epoch)
        self._num_samples_to_skip = steps * self._config.accumulate * self._config.batch_size
        # With SmartCacheDataset each epoch has other volumes in the cache; with others `go_to` does nothing.
        if self._epoch_in_cache != self._epoch:
            self._shard.go_to(self._epoch)
            self._epoch_in_cache = self._epoch

    def close(self) -> None:
        """End threads and processes; may be called more than once."""
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
        """Yield the samples of an epoch in order, without the skipped ones.

        Volumes that are not needed are not visited.
        """
        visits, order = self._plan(epoch)
        order = order[num_to_skip:]
        num_wanted = Counter(number for number, _ in order)
        # By visit, the samples of visits that are not used up: samples of about four volumes are mixed.
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
        # Run the generator to its end, where it closes worker processes that do not stay.
        for _ in arriving:
            raise AssertionError("a visit was made for nothing")

    def _plan(self, epoch: int) -> tuple[list[Visit], list[tuple[int, int]]]:
        """Return (the visits of an epoch, the order of its samples as (number of the visit, index in it))."""
        seeds = np.random.SeedSequence([self._config.seed, self._rank, epoch]).generate_state(2)
        order_seed, mix_seed = (int(seed) for seed in seeds)
        per_volume = self._draw.samples_per_volume
        # Rounded up: the last visit may give more samples than the epoch needs.
        num_visits = -(-self._num_samples // per_volume)
        rng = np.random.RandomState(order_seed)
        if self._rare is not None:
            volumes = self._spread(self._rare, epoch, rng)
        else:
            volumes = []
            while len(volumes) < num_visits:  # visit all volumes in turn; the last round may be cut off
                volumes += rng.permutation(len(self._shard)).tolist()
        visits = [Visit(volume, epoch, number) for number, volume in enumerate(volumes[:num_visits])]
        # Shortened before mixing: afterwards volumes of a second round could displace some of the first.
        samples = [(v.number, index) for v in visits for index in range(per_volume)][: self._num_samples]
        if self._rare is not None:
            # Mixing would move rare volumes to other micro-batches.
            return visits, samples
        mixed = ShuffleBuffer(samples, buffer_size=_NUM_VOLUMES_MIXED * per_volume, seed=mix_seed % 2**31)
        return visits, list(mixed)

    def _spread(self, rare: _Rare, epoch: int, rng: np.random.RandomState) -> list[int]:
        """Return the volumes that an epoch visits, in order, with the rare ones spread over its
        micro-batches."""
        size = self._config.batch_size
        # Without the rank: each rank computes how many rare volumes the others have in each micro-batch.
        shared_seed = np.random.SeedSequence([self._config.seed, epoch]).generate_state(1)[0]
        counts = micro_batches_of_rare(
            rare.num_visits, self._rank, self.num_micro_batches, size, np.random.RandomState(shared_seed)
        )
        rare_ones, others = map(iter, draw_visits(rare.is_rare, self._num_samples, rng))
        return [
            volume
            for count in counts
            for volume in (*islice(rare_ones, count), *islice(others, size - count))
        ]

    def _visited(self, visits: list[Visit]) -> Iterator[tuple[Visit, list[Sample]]]:
        """Yield each visit with its samples, made in this thread or by the worker processes."""
        if not self._workers.count:
            dataset = Visits(self._shard, self._draw, self._config.seed, self._rank)
            yield from ((visit, dataset[visit]) for visit in visits)
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
            # The next epoch has other volumes in the cache, and needs new workers, which get these volumes.
            self._pool.close()
            self._pool = None

    def _collate(self, samples: list[Sample | Exception]) -> Batch | Exception:
        """Stack samples to a batch, in pinned memory if the settings say so; an exception among them takes
        the batch's place."""
        for sample in samples:
            if isinstance(sample, Exception):
                return sample
        batch: dict[str, Tensor] = default_collate(samples)
        return {name: value.pin_memory() for name, value in batch.items()} if self._pinned else batch


def _errors_as_items(samples: Iterator[Sample]) -> Iterator[Sample | Exception]:
    """Yield the samples, and an exception as the last item.

    Raised in MONAI's prefetching thread, the exception would end the thread, and the epoch would look
    finished.
    """
    try:
        yield from samples
    except Exception as error:  # noqa: BLE001 - SampleLoader raises it in the consumer's thread
        yield error


# ---- held-out patches ----------------------------------------------------------------------------------


def grid_patches(
    image: Tensor, patch_size: int | Sequence[int], max_patches: int, min_foreground: float = 0.5
) -> Tensor:
    """Return patches of a decoded volume (C, D, H, W) on a grid: (N, C, p, q, r), N >= 1.

    The patches of a volume are the same in each call. The grid is centred, and its cells overlap by half. A
    patch is a cell in which at least the share `min_foreground` of the voxels is brighter than the volume's
    mean. If no cell has this share, those with the largest share are taken. Of more than `max_patches` an
    evenly spaced choice is returned.
    """
    edges = (patch_size,) * 3 if isinstance(patch_size, int) else tuple(patch_size)
    strides = [max(1, edge // 2) for edge in edges]
    starts = [
        (n - edge) % stride // 2 for n, edge, stride in zip(image.shape[1:], edges, strides, strict=True)
    ]
    bright = (image > image.mean()).float()[(slice(None), *(slice(start, None) for start in starts))]
    # The mean over a cell of 0 and 1 is the share of its bright voxels.
    foreground = avg_pool3d(bright[None], edges, strides)[0].mean(dim=0)
    cells = (foreground >= min(min_foreground, float(foreground.max()))).nonzero()
    if len(cells) > max_patches:
        evenly = torch.linspace(0, len(cells) - 1, max_patches, dtype=torch.float32, device="cpu")
        cells = cells[evenly.round().long()]
    step, first = (torch.tensor(numbers, dtype=torch.int64, device="cpu") for numbers in (strides, starts))
    p, q, r = edges
    corners = (cells * step + first).tolist()
    return torch.stack([image[:, x : x + p, y : y + q, z : z + r] for x, y, z in corners])
