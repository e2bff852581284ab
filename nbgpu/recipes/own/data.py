"""Samples of any torch dataset, divided over the ranks: each once an epoch, in an order that depends on the
seed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.transforms import Randomizable
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from nbgpu.config import TrainConfig
from nbgpu.engine.data import workers as data_workers
from nbgpu.engine.data.identity import digest
from nbgpu.engine.data.sampling import Sample
from nbgpu.engine.data.workers import WorkerProcesses
from nbgpu.engine.workload.recipe import Batch, Identity
from nbgpu.planning import epochs, workers
from nbgpu.planning.epochs import DataAmount

_log = logging.getLogger("nbgpu.own_data")
_ADVICE = (
    "Every rank makes the whole dataset, and nbgpu shares it out: `dataset` and `val_dataset` must give the same on all ranks. "
    "Take no share by rank there, sort what a folder or a set holds, and give random.Random, np.random.default_rng and "
    "torch.Generator a seed"
)
_PART = "part {}"
"""The Trainer's name for a part of a sample that is a tuple."""


def named(sample: Any) -> Sample:
    """Return a sample's parts as tensors by name; TypeError if a part cannot be a tensor."""
    if not isinstance(sample, Mapping):
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        sample = {_PART.format(i): part for i, part in enumerate(parts)}
    return {str(name): _tensor(str(name), part) for name, part in sample.items()}


def _tensor(name: str, part: Any) -> Tensor:
    """Convert a part of a sample to a plain tensor; TypeError if it cannot be one."""
    try:
        return torch.as_tensor(part).as_subclass(Tensor)
    except (TypeError, ValueError, RuntimeError):
        kind = type(part).__name__
        raise TypeError(f"{name!r} is a {kind}; a sample has tensors, arrays and numbers") from None


def as_given(batch: Batch) -> Any:
    """Turn a batch of samples from `named` back into a dict, a tuple, or a single part."""
    if not all(name.startswith("part ") for name in batch):
        return dict(batch)
    parts = tuple(batch.values())
    return parts if len(parts) > 1 else parts[0]


class _SampleIndex(NamedTuple):
    """The place of a sample in an epoch."""

    epoch: int
    sample: int


def identity_of(dataset: Dataset[Any], config: TrainConfig, what: str) -> Identity:
    """Return the number of samples of a dataset, and digests of the first, the middle and the last one.

    Args:
        dataset: the dataset from the recipe's file.
        config: the settings, which have the `seed` and the number of worker processes.
        what: 'dataset' or 'val_dataset'.
    """
    length = len(dataset)  # type: ignore[arg-type]
    # A file that a sample opens stays open in the dataset, and could not be sent to worker processes.
    samples = _Samples(copy(dataset) if config.num_workers else dataset, config.seed, what)
    digests = {}
    for index in sorted({0, length // 2, length - 1}) if length else ():
        try:
            digests[f"sample {index}"] = digest(samples[_SampleIndex(0, index)][0])
        except Exception as error:  # noqa: BLE001 - it is raised with the person's line in the step that takes the sample
            _log.info("sample %d of %s is not compared: %r", index, what, error)
            digests[f"sample {index}"] = ""
    return {"length": length, "samples": digests, "advice": _ADVICE}


class Reader:
    """A rank's batches; each iteration is one epoch.

    All ranks take the samples of a step from one order, which depends only on the seed and the epoch, so that
    a step has the same samples with any number of ranks.

    Args:
        dataset: the training samples.
        amount: their number, and that of the samples that are held out.
        config: the settings, of which `batch_size`, `accumulate`, `shards`, `seed` and those of workers are
            used.
        rank, world_size: this rank, and the number of ranks.
        device: the rank's device; batches stay on the CPU, in pinned memory for a GPU.
        code: brings the dataset's classes to a worker process when it is unpickled there.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        amount: DataAmount,
        config: TrainConfig,
        rank: int,
        world_size: int,
        device: torch.device,
        code: object = None,
    ) -> None:
        """Plan the epoch; worker processes are started by the first iteration."""
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._num_samples = amount.num_volumes
        self.steps_per_epoch, words = epochs.epoch_of_samples(config, amount, world_size)
        self._num_workers = config.num_workers or 0
        self.summary = (*words, workers.workers_for_own(config).in_words())
        self._epoch = 0
        self._num_batches_to_skip = 0
        self._samples = _Samples(dataset, config.seed, code=code)
        self._pool: WorkerProcesses | None = None
        self._pinned = device.type == "cuda" and config.pin_memory != "off"

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rank's batches of one epoch, stacked on the CPU, from the place that `seek` has set."""
        batches = self._plan(self._epoch)[self._num_batches_to_skip :]
        self._epoch += 1
        self._num_batches_to_skip = 0
        samples = self._read([place for batch in batches for place in batch])
        for batch in batches:
            stacked = default_collate([next(samples)[0] for _ in batch])
            yield {name: part.pin_memory() for name, part in stacked.items()} if self._pinned else stacked

    def seek(self, step: int) -> None:
        """Make the next iteration begin with the batches of this optimizer step, counted from 0 over all
        epochs."""
        self._epoch, steps = divmod(step, self.steps_per_epoch)
        self._num_batches_to_skip = steps * self._config.accumulate

    def close(self) -> None:
        """End worker processes; may be called more than once."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _read(self, places: Sequence[_SampleIndex]) -> Iterator[list[Sample]]:
        """Return an iterator over the samples at these places, read in this process or ahead of time in
        workers."""
        if not self._num_workers:
            return (self._samples[place] for place in places)
        if self._pool is None:
            self._pool = WorkerProcesses(
                self._samples,
                data_workers.prepare({__name__}),
                num_workers=self._num_workers,
                prefetch=self._config.prefetch * self._config.batch_size,
                stay=self._config.persistent_workers != "off",
                rank=self._rank,
            )
        return self._pool.samples_of(places)

    def _plan(self, epoch: int) -> list[list[_SampleIndex]]:
        """Return the places of the samples in each of the rank's batches of an epoch."""
        config = self._config
        rng = np.random.RandomState(np.random.SeedSequence([config.seed, epoch]).generate_state(1))
        num_wanted = self.steps_per_epoch * config.samples_per_step(self._world_size)
        # The last step is filled up with samples from the beginning.
        order = np.resize(rng.permutation(self._num_samples), num_wanted)
        # The samples of a micro-batch stand side by side: first those of rank 0, then those of rank 1, and so
        # on.
        shares = order.reshape(-1, self._world_size, config.batch_size)[:, self._rank]
        return [[_SampleIndex(epoch, int(index)) for index in batch] for batch in shares]


class HeldOut:
    """A rank's share of the held-out samples, in order; each sample is on one rank."""

    def __init__(
        self, dataset: Dataset[Any], config: TrainConfig, rank: int, world_size: int, what: str = "dataset"
    ) -> None:
        """Divide the held-out samples into batches: the rank takes every world_size-th sample, in order."""
        own = range(rank, len(dataset), world_size)  # type: ignore[arg-type]
        self._samples = _Samples(dataset, config.seed, what)
        self._batches = [
            [_SampleIndex(0, index) for index in own[first : first + config.batch_size]]
            for first in range(0, len(own), config.batch_size)
        ]

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            yield default_collate([self._samples[place][0] for place in batch])


class _Samples(Dataset[list[Sample]]):
    """One sample at each place, whose random changes follow from (seed, epoch, number of the sample) in any
    process.

    The process's global generators are seeded for each sample. In a rank that does no harm: the Trainer seeds
    them for each step.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, what: str = "dataset", code: object = None) -> None:
        self._code = code  # before the dataset: pickle keeps the order
        self._dataset = dataset
        self._seed = seed
        self._what = what

    def __getitem__(self, place: _SampleIndex) -> list[Sample]:
        """Seed torch's, NumPy's, Python's and MONAI's generators for this place, and read the sample. An
        error gets a note with the sample's number in the person's dataset."""
        seeds = np.random.SeedSequence([self._seed, place.epoch, place.sample]).generate_state(4)
        torch_seed, numpy_seed, python_seed, transform_seed = (int(seed) for seed in seeds)
        torch.default_generator.manual_seed(torch_seed)
        np.random.seed(numpy_seed)
        random.seed(python_seed)
        if (transform := _transform(self._dataset)) is not None:
            transform.set_random_state(transform_seed)
        try:
            return [named(self._dataset[place.sample])]
        except Exception as error:
            error.add_note(f"in sample {_index_in_own(self._dataset, place.sample)} of the {self._what}")
            raise


def _index_in_own(dataset: Any, index: int) -> int:
    """Return the index for the person's own `__getitem__`: a Subset counts its samples from 0 again."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return index


def _transform(dataset: Dataset[Any]) -> Randomizable | None:
    """Return a dataset's MONAI transform, which draws from a generator of its own."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    transform = getattr(dataset, "transform", None)
    return transform if isinstance(transform, Randomizable) else None
