"""Numbers on their way from the device to the host, read later than they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nbgpu.engine.training.step_clock import StepClock


class Readings:
    """Copies scalars to the host without waiting for them.

    A plain `item()` waits for all work that the device has been given so far, including the next step.
    `values` waits only for the work that computes these numbers, and for nothing that was queued after it.

    Args:
        tensors: scalars by name, of any real type, all on one device.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        scalars = [tensor.detach().to(torch.float64) for tensor in tensors.values()]
        stacked = torch.stack(scalars) if scalars else torch.empty(0, dtype=torch.float64, device="cpu")
        self._copied: torch.cuda.Event | None = None
        self._on_host = stacked
        if stacked.is_cuda:
            self._on_host = torch.empty(len(stacked), dtype=torch.float64, device="cpu", pin_memory=True)
            self._on_host.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def values(self) -> dict[str, float]:
        """Return the numbers; wait until they have been computed."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._names, self._on_host.tolist(), strict=True))


@dataclass(frozen=True)
class StepRecord:
    """The numbers of a finished step, which are read and recorded while the next step is in progress."""

    step: int
    ended_s: float
    """In seconds since the epoch."""
    readings: Readings
    """The numbers computed on the device."""
    numbers: Mapping[str, float]
    """The numbers known to the host."""
    clock: StepClock
    """The parts of the step's time."""
    inputs: Readings
    """The guard's findings about the step's batches, by the names of their tensors."""
