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
_IDENTITY_ADVICE = (
    "Every rank makes the whole dataset, and nbgpu shares it out: `dataset` and `val_dataset` must give the same on all ranks. "
    "Take no share by rank there, sort what a folder or a set holds, and give random.Random, np.random.default_rng and "
    "torch.Generator a seed"
)
_PART = "part "
"""The name that the Trainer gives an element of a tuple sample begins with this."""


def named(sample: Any) -> Sample:
    """Return the parts of a sample as tensors by name. The elements of a tuple are named by their number.

    Raises:
        TypeError: a part cannot be a tensor.
    """
    if not isinstance(sample, Mapping):
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        sample = {f"{_PART}{i}": part for i, part in enumerate(parts)}
    return {str(name): _tensor(str(name), part) for name, part in sample.items()}


def _tensor(name: str, part: Any) -> Tensor:
    """Convert a part of a sample to a plain tensor, also one of a subclass such as MONAI's MetaTensor."""
    try:
        return torch.as_tensor(part).as_subclass(Tensor)
    except (TypeError, ValueError, RuntimeError):
        kind = type(part).__name__
        raise TypeError(f"{name!r} is a {kind}; a sample has tensors, arrays and numbers") from None


def as_given(batch: Batch) -> Any:
    """Return a batch of samples from `named` in the form that the person's samples have: a dict, a tuple, or
    a single tensor."""
    if not all(name.startswith(_PART) for name in batch):
        return dict(batch)
    parts = tuple(batch.values())
    return parts if len(parts) > 1 else parts[0]


class _SampleIndex(NamedTuple):
    """The number of a sample in its dataset, and the epoch in which it is read."""

    epoch: int
    sample: int


def dataset_identity(dataset: Dataset[Any], config: TrainConfig, what: str) -> Identity:
    """Return the number of samples of a dataset, and digests of the first, the middle and the last sample.
    The ranks compare them, to find out whether their datasets differ.

    Args:
        dataset: the dataset from the recipe's file.
        config: the settings, which have the `seed` and the number of worker processes.
        what: 'dataset' or 'val_dataset'.
    """
    length = len(dataset)  # type: ignore[arg-type]
    # The dataset may keep a file open that a sample has opened, and could then not be pickled for workers.
    samples = _Samples(copy(dataset) if config.num_workers else dataset, config.seed, what)
    digests = {}
    for index in sorted({0, length // 2, length - 1}) if length else ():
        try:
            digests[f"sample {index}"] = digest(samples[_SampleIndex(0, index)][0])
        except Exception as error:  # noqa: BLE001 - it is raised with the person's line in the step that takes the sample
            _log.info("sample %d of %s is not compared: %r", index, what, error)
            digests[f"sample {index}"] = ""
    return {"length": length, "samples": digests, "advice": _IDENTITY_ADVICE}


class Reader:
    """A rank's batches; each iteration is one epoch.

    All ranks take the samples of a step from the same permutation of the dataset, which depends only on the
    seed and the epoch. A step therefore has the same samples with any number of ranks.

    Args:
        dataset: the training samples.
        amount: the numbers of training samples and of held-out samples.
        config: the settings. `batch_size`, `accumulate`, `shards`, `seed` and those of workers are used.
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
        self.steps_per_epoch, sentences = epochs.epoch_of_samples(config, amount, world_size)
        self._num_workers = config.num_workers or 0
        self.summary = (*sentences, workers.workers_for_own(config).in_words())
        self._epoch = 0
        self._num_batches_to_skip = 0
        self._samples = _Samples(dataset, config.seed, code=code)
        self._pool: WorkerProcesses | None = None
        self._pinned = device.type == "cuda" and config.pin_memory != "off"

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rank's batches of one epoch, stacked on the CPU, from the step that `seek` has set."""
        batches = self._plan(self._epoch)[self._num_batches_to_skip :]
        self._epoch += 1
        self._num_batches_to_skip = 0
        samples = self._read([index for batch in batches for index in batch])
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

    def _read(self, indices: Sequence[_SampleIndex]) -> Iterator[list[Sample]]:
        """Return an iterator over the samples, read in this process or prefetched by worker processes."""
        if not self._num_workers:
            return (self._samples[index] for index in indices)
        if self._pool is None:
            self._pool = WorkerProcesses(
                self._samples,
                data_workers.prepare({__name__}),
                num_workers=self._num_workers,
                prefetch=self._config.prefetch * self._config.batch_size,
                stay=self._config.persistent_workers != "off",
                rank=self._rank,
            )
        return self._pool.samples_of(indices)

    def _plan(self, epoch: int) -> list[list[_SampleIndex]]:
        """Return the samples of each of the rank's micro-batches of an epoch."""
        config = self._config
        rng = np.random.RandomState(np.random.SeedSequence([config.seed, epoch]).generate_state(1))
        num_wanted = self.steps_per_epoch * config.samples_per_step(self._world_size)
        # The last step is filled up with samples from the beginning of the permutation.
        order = np.resize(rng.permutation(self._num_samples), num_wanted)
        # Axes: micro-batches, ranks, samples.
        shares = order.reshape(-1, self._world_size, config.batch_size)[:, self._rank]
        return [[_SampleIndex(epoch, int(index)) for index in batch] for batch in shares]


class HeldOut:
    """A rank's batches of held-out samples: every world_size-th sample, in order, so that each sample is read
    by one rank."""

    def __init__(
        self, dataset: Dataset[Any], config: TrainConfig, rank: int, world_size: int, what: str = "dataset"
    ) -> None:
        """Keep the rank's share; `what` is the name of the dataset in messages."""
        self._indices = range(rank, len(dataset), world_size)  # type: ignore[arg-type]
        self._samples = _Samples(dataset, config.seed, what)
        self._batch_size = config.batch_size

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._indices), self._batch_size):
            batch = self._indices[first : first + self._batch_size]
            yield default_collate([self._samples[_SampleIndex(0, index)][0] for index in batch])


class _Samples(Dataset[list[Sample]]):
    """The samples of a dataset, whose random changes depend only on the seed, the epoch and the number of the
    sample, in whichever process they are read.

    The process's global generators are seeded for each sample. In a rank that does no harm, because the
    Trainer seeds them for each step.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, what: str = "dataset", code: object = None) -> None:
        self._code = code  # before the dataset: pickle keeps the order
        self._dataset = dataset
        self._seed = seed
        self._what = what

    def __getitem__(self, index: _SampleIndex) -> list[Sample]:
        """Seed torch's, NumPy's, Python's and MONAI's generators for this sample and epoch, and read the
        sample. An error gets a note with the sample's number in the person's dataset."""
        seeds = np.random.SeedSequence([self._seed, index.epoch, index.sample]).generate_state(4)
        torch_seed, numpy_seed, python_seed, transform_seed = (int(seed) for seed in seeds)
        torch.default_generator.manual_seed(torch_seed)
        np.random.seed(numpy_seed)
        random.seed(python_seed)
        if (transform := _transform(self._dataset)) is not None:
            transform.set_random_state(transform_seed)
        try:
            return [named(self._dataset[index.sample])]
        except Exception as error:
            error.add_note(f"in sample {_original_index(self._dataset, index.sample)} of the {self._what}")
            raise


def _original_index(dataset: Any, index: int) -> int:
    """Return the index of a sample in the person's dataset: a Subset, as nbgpu makes it for held-out samples,
    numbers its samples anew."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return index


def _transform(dataset: Dataset[Any]) -> Randomizable | None:
    """Return the MONAI transform of a dataset, which has a random generator of its own; None if there is
    none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    transform = getattr(dataset, "transform", None)
    return transform if isinstance(transform, Randomizable) else None
