"""Marks each batch with whether the encoder learns from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from nbgpu.engine.workload.recipe import Batch, Loaders

FROZEN = "frozen"
"""The name under which a batch holds, for each sample, whether only the last layer learns from it."""


def freezing(loaders: Loaders, num_epochs: int) -> Loaders:
    """Return the loaders with FROZEN in each training batch: True in the first epochs of the run, which
    count from its first step also where training begins later."""
    train = _Frozen(loaders, num_epochs)
    return replace(loaders, train=train, seek=train.seek)


class _Frozen:
    """An iterable over the batches of an epoch that counts epochs and marks those of the first ones."""

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
