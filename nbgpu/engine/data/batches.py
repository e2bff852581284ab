"""The batches of each optimizer step, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbgpu.config import TrainConfig
from nbgpu.engine.model import precision
from nbgpu.engine.workload.recipe import Batch, Loaders


class StepBatches:
    """Takes a rank's batches from its loaders, step by step.

    A step's batches are kept until the step is done, so that an interrupted step is repeated with the same
    batches.

    Args:
        loaders: the recipe's loaders for this rank.
        config: the settings; they give the micro-batches of a step, the memory format of volumes, and whether
            copies overlap with other work.
        device: the device to which batches are moved.
        stand_in: makes a batch on the CPU with the shapes of the loaders' batches.
    """

    def __init__(
        self, loaders: Loaders, config: TrainConfig, device: torch.device, stand_in: Callable[[], Batch]
    ) -> None:
        self.loaders = loaders
        self._stand_in = stand_in
        self._config = config
        self._device = device
        self._batches: Iterator[Batch] | None = None
        self._next_step: int | None = 0
        """The step whose batches `_batches` gives next; None if that is unknown."""
        self.began: tuple[int, int] = 0, 0
        """(step, epoch) of the run at which an epoch of these loaders began, from which steps and epochs are
        counted: the first ones, or later ones if the run got new loaders midway."""
        self._taken: tuple[int, list[Batch]] | None = None
        """The step in progress and its batches; None between two steps."""

    def begin_at(self, step: int, epoch: int) -> None:
        """Let an epoch of these loaders begin at a step of the run."""
        self.began = step, epoch
        self._next_step = None

    def begin_as(self, earlier: Mapping[str, Any], step: int) -> str:
        """Begin at the position in the data at which a checkpoint was written.

        If an epoch now has another number of steps, because of the batch size, the number of ranks or the
        data, the checkpoint's epoch begins again: the step does not tell which of its samples were used.

        Args:
            earlier: the checkpoint's `state`, with the fields of `position`.
            step: the optimizer steps done.

        Returns:
            A sentence about the changed number of steps; empty if it is the same.
        """
        first_step, first_epoch = earlier["data_began"]
        now = self.loaders.steps_per_epoch
        before = earlier["steps_per_epoch"]
        if before == now:
            self.begin_at(first_step, first_epoch)
            return ""
        num_whole, left_over = divmod(step - first_step, before)
        epoch = first_epoch + num_whole
        self.begin_at(step, epoch)
        again = f"; epoch {epoch + 1} begins again" if left_over else ""
        return f"an epoch has {now} steps now, {before} before{again}"

    @property
    def position(self) -> dict[str, Any]:
        """Return the position in the data for a checkpoint, as JSON, from which `begin_as` continues."""
        return {"data_began": self.began, "steps_per_epoch": self.loaders.steps_per_epoch}

    def epoch_at(self, step: int) -> tuple[int, int]:
        """Return (the epoch of a step, the step's index in that epoch), both counted from 0."""
        first_step, first_epoch = self.began
        epochs, steps = divmod(step - first_step, self.loaders.steps_per_epoch)
        return first_epoch + epochs, steps

    def total_steps(self, config: TrainConfig) -> int:
        """Return the number of optimizer steps of the whole run."""
        first_step, first_epoch = self.began
        if config.epochs is None:
            return config.steps
        return first_step + max(0, config.epochs - first_epoch) * self.loaders.steps_per_epoch

    def take(self, step: int) -> tuple[list[Batch], Exception | None]:
        """Return the micro-batches of one step, and the error in fetching them.

        After an error the micro-batches are generated ones: with fsdp or SyncBatchNorm the other ranks would
        otherwise wait for this one within the model, before the error reaches them with the consensus
        message.
        """
        if self._taken is None or self._taken[0] != step:
            try:
                self._taken = step, self._fetch(step)
            except Exception as error:  # noqa: BLE001 - all ranks must learn of any error
                return [self.to_device(self._stand_in())] * self._config.accumulate, error
        return self._taken[1], None

    def done(self) -> None:
        """Release the batches of a step that is done."""
        self._taken = None

    def in_hand(self) -> Batch:
        """Return the first micro-batch of the current step; empty between two steps."""
        return self._taken[1][0] if self._taken is not None else {}

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch on the device, as the model takes it."""
        return precision.as_inputs(self._config, batch, self._device)

    def _fetch(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step from the loader, on the device; seek first if the loader stands
        elsewhere."""
        if self._next_step != step:
            # Training continues midway, or fetching was interrupted.
            self._batches = None
            epoch, steps = self.epoch_at(step)
            self.loaders.seek(epoch * self.loaders.steps_per_epoch + steps)
        # If fetching is interrupted, the loader's position is unknown: None makes the next call seek.
        self._next_step = None
        batches = [self.to_device(self._next_batch()) for _ in range(self._config.accumulate)]
        self._next_step = step + 1
        return batches

    def _next_batch(self) -> Batch:
        """Return the next batch of the loader, and begin the next epoch when the present one has ended."""
        if self._batches is None:
            self._batches = iter(self.loaders.train)
        try:
            return next(self._batches)
        except StopIteration:
            self.loaders.next_epoch()
            self._batches = iter(self.loaders.train)
            return next(self._batches)
