"""Marks the batches of the first epochs, in which the encoder is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from nbgpu.engine.workload.recipe import Batch, Loaders

FROZEN = "frozen"
"""The key of a batch's flags (N,), one for each sample: whether only the last layer is trained."""


def freezing(loaders: Loaders, num_epochs: int) -> Loaders:
    """Return the loaders with FROZEN in each training batch: True in the first `num_epochs` epochs of the
    run. A run that resumes a checkpoint counts the epochs before it."""
    train = _Frozen(loaders, num_epochs)
    return replace(loaders, train=train, seek=train.seek)


class _Frozen:
    """An iterable over the batches of an epoch, which counts the epochs and adds FROZEN to the batches."""

    def __init__(self, loaders: Loaders, num_epochs: int) -> None:
        self._loaders = loaders
        self._num_epochs = num_epochs
        self._epoch = 0

    def seek(self, step: int) -> None:
        self._loaders.seek(step)
        self._epoch = step // self._loaders.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        is_frozen = self._epoch < self._num_epochs
        self._epoch += 1
        for batch in self._loaders.train:
            num_samples = len(next(iter(batch.values())))
            yield {**batch, FROZEN: torch.full((num_samples,), is_frozen)}
