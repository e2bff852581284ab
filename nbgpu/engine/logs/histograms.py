"""Weights and gradients at some steps, for histograms."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Empty, SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MAX_VALUES = 10_000
"""Of each tensor as many at most, evenly spread: a histogram needs no more, and a large model is not copied."""


class Histograms:
    """Takes values on the thread that trains, and hands them to the one that writes.

    Args:
        every: steps between two; 0 for none.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._taken: SimpleQueue[tuple[int, dict[str, NDArray[np.float32]]]] = SimpleQueue()

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    @torch.no_grad()
    def take(self, step: int, model: nn.Module) -> None:
        """Copies values of each parameter ('weights/NAME') and its gradient ('gradients/NAME')."""
        values: dict[str, NDArray[np.float32]] = {}
        for name, parameter in model.named_parameters():
            values[f"weights/{name}"] = _some(parameter)
            if parameter.grad is not None:
                values[f"gradients/{name}"] = _some(parameter.grad)
        self._taken.put((step, values))

    def given(self) -> Iterator[tuple[int, dict[str, NDArray[np.float32]]]]:
        """What was taken since the last call: (step, finite values by name)."""
        while True:
            try:
                yield self._taken.get_nowait()
            except Empty:
                return


def _some(tensor: Tensor) -> NDArray[np.float32]:
    # Of a tensor that is spread over ranks (fully_shard), this rank's share.
    local: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    flat = local.detach().flatten()
    every = -(-flat.numel() // MAX_VALUES)
    values: NDArray[np.float32] = flat[:: max(every, 1)].float().cpu().numpy().copy()
    return values[np.isfinite(values)]
