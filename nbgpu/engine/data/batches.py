"""The batches of each optimizer step, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from nbgpu.config import TrainConfig
from nbgpu.engine.model import precision
from nbgpu.engine.workload.recipe import Batch, Loaders


class Feed:
    """Takes a rank's batches from its loaders, step by step.

    A step's batches stay until the step is done: one that was cut off is done again with the same.

    Args:
        loaders: the recipe's, for this rank.
        config: how many micro-batches a step has, how volumes stand in memory, and whether they are copied beside
            other work.
        device: where batches go.
        stand_in: makes a batch on the CPU, shaped as the loaders' are.
    """

    def __init__(
        self, loaders: Loaders, config: TrainConfig, device: torch.device, stand_in: Callable[[], Batch]
    ) -> None:
        self.loaders = loaders
        self._stand_in = stand_in
        self._accumulate = config.accumulate
        self._dtype = precision.dtype(config)
        self._channels_last = config.channels_last
        self._non_blocking = config.non_blocking
        self._device = device
        self._batches: Iterator[Batch] | None = None
        self._next_step: int | None = 0
        """The step whose batches `_batches` gives next; None while they are being taken."""
        self._began: tuple[int, int] = 0, 0
        self._taken: tuple[int, list[Batch]] | None = None
        """A step that is not done yet, and its batches."""

    @property
    def began(self) -> tuple[int, int]:
        """(step, epoch) with which these loaders began: a run that gets others in its course counts on."""
        return self._began

    def begin_at(self, step: int, epoch: int) -> None:
        """Says that the first batch of an epoch of these loaders is that of a step."""
        self._began = step, epoch
        self._next_step = None

    def epoch_at(self, step: int) -> tuple[int, int]:
        """(the epoch that a step belongs to, how many of its steps come before it), both counted from 0."""
        first_step, first_epoch = self._began
        epochs, steps = divmod(step - first_step, self.loaders.steps_per_epoch)
        return first_epoch + epochs, steps

    def total_steps(self, config: TrainConfig) -> int:
        """Optimizer steps of the whole run."""
        first_step, first_epoch = self._began
        if config.epochs is None:
            return config.steps
        return first_step + max(0, config.epochs - first_epoch) * self.loaders.steps_per_epoch

    def take(self, step: int) -> tuple[list[Batch], Exception | None]:
        """The micro-batches of one step, and what went wrong in fetching them.

        After a failure they are stand-ins: the rank computes with the others to where all learn of it, because
        they would wait for it in whatever the model itself exchanges.
        """
        if self._taken is None or self._taken[0] != step:
            try:
                self._taken = step, self._fetch(step)
            except Exception as error:  # noqa: BLE001 - whatever it is, all ranks must learn of it
                return [self.to_device(self._stand_in())] * self._accumulate, error
        return self._taken[1], None

    def done(self) -> None:
        """The step is done, and its batches are needed no more."""
        self._taken = None

    def in_hand(self) -> Batch:
        """The first micro-batch of the step that is under way; empty between two steps."""
        return self._taken[1][0] if self._taken is not None else {}

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the device, its numbers in the type of the weights."""
        return {name: self._moved(value) for name, value in batch.items()}

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if value.is_floating_point() else value.dtype
        is_volume = self._channels_last and value.dim() == 5
        memory_format = torch.channels_last_3d if is_volume else torch.preserve_format
        return value.to(self._device, dtype, non_blocking=self._non_blocking, memory_format=memory_format)

    def _fetch(self, step: int) -> list[Batch]:
        if self._next_step != step:
            # Training goes on in the middle, or fetching was interrupted.
            self._batches = None
            epoch, steps = self.epoch_at(step)
            self.loaders.seek(epoch * self.loaders.steps_per_epoch + steps)
        self._next_step = None
        batches = [self.to_device(self._next_batch()) for _ in range(self._accumulate)]
        self._next_step = step + 1
        return batches

    def _next_batch(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self.loaders.train)
        try:
            return next(self._batches)
        except StopIteration:
            self.loaders.next_epoch()
            self._batches = iter(self.loaders.train)
            return next(self._batches)
