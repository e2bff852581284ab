"""Weights and gradients at some steps, for histograms."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MAX_VALUES = 10_000
"""The largest number of values of a tensor, evenly spread: enough for a histogram, without a copy of a large
model."""


class Histograms:
    """Takes values on the training thread, and hands them to the writing thread.

    Args:
        every: the number of steps between two histograms; 0 for none.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._taken: SimpleQueue[tuple[int, dict[str, NDArray[np.float32]]]] = SimpleQueue()

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    @torch.no_grad()
    def take(self, step: int, model: nn.Module) -> None:
        """Copy values of each parameter ('weights/NAME') and of its gradient ('gradients/NAME')."""
        values: dict[str, NDArray[np.float32]] = {}
        for name, parameter in model.named_parameters():
            values[f"weights/{name}"] = _subsample(parameter)
            if parameter.grad is not None:
                values[f"gradients/{name}"] = _subsample(parameter.grad)
        self._taken.put((step, values))

    def take_new(self) -> Iterator[tuple[int, dict[str, NDArray[np.float32]]]]:
        """Yield the values taken since the last call as (step, finite values by name)."""
        # No other thread takes from the queue, so that it does not become empty between these two calls.
        while not self._taken.empty():
            yield self._taken.get()


def _subsample(tensor: Tensor) -> NDArray[np.float32]:
    """Return at most `MAX_VALUES` finite values of a tensor, evenly spread, as float32 on the CPU."""
    # For a sharded tensor (fully_shard) these are the values of this rank's shard.
    local: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    flat = local.detach().flatten()
    every = -(-flat.numel() // MAX_VALUES)
    values: NDArray[np.float32] = flat[:: max(every, 1)].float().cpu().numpy().copy()
    return values[np.isfinite(values)]
