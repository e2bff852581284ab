"""Records when gradients were ready to be exchanged, and when the average of all ranks had arrived."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nbgpu.engine.model.bucket_hooks import BucketHook
from nbgpu.engine.model.moments import Moment


@dataclass
class Transfer:
    """Gradients that travel together, such as one of DDP's buckets."""

    ready: Moment
    """When the rank had computed the last of these gradients."""
    num_bytes: int
    arrived: Moment | None = None
    """When the rank had the average of all ranks, also of the slowest one; None until then."""


class Waits:
    """Records when a rank waits within a forward or backward pass for collectives, during which it cannot
    compute.

    Times are those of the host's monotonic clock, in seconds. They are meaningful on a CPU only: on a GPU the
    host does not wait.
    """

    def __init__(self) -> None:
        self._of_step: list[tuple[float, float]] | None = None

    def begin(self) -> list[tuple[float, float]]:
        """Begin a step; return the list to which the beginning and the end of each wait are added."""
        self._of_step = []
        return self._of_step

    def end(self) -> None:
        """End the step: nothing is noted until the next one begins."""
        self._of_step = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the time inside the context."""
        begun_s = time.monotonic()
        yield
        if self._of_step is not None:
            self._of_step.append((begun_s, time.monotonic()))


for_statistics = Waits()
"""The waits of this rank for BatchNorm's statistics of all ranks."""


class Transfers:
    """Records when gradients travel, in steps whose times are recorded.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_step: list[Transfer] | None = None

    def begin(self) -> list[Transfer]:
        """Begin a step; return the list to which its transfers are added. Transfers of an earlier step that
        arrive late belong to that step's list."""
        self._of_step = []
        return self._of_step

    def end(self) -> None:
        """End the step: nothing is noted until the next one begins."""
        self._of_step = None

    def noting(self, hook: BucketHook) -> BucketHook:
        """Wrap a communication hook of DDP, to record when each bucket was ready and when it had arrived.

        The arrival is recorded before DDP uses the bucket, because DDP waits for the future that the wrapped
        hook returns.
        """

        def send(bucket: Any) -> torch.futures.Future[Tensor]:
            if self._of_step is None:
                return hook(None, bucket)
            transfer = self._ready(bucket.buffer())
            return hook(None, bucket).then(lambda sent: self._arrived(transfer, sent))

        # A lambda, because torch refuses a hook whose annotations are strings, as those of this module are.
        return lambda _, bucket: send(bucket)

    @contextmanager
    def recording_wait(self, gradients: Tensor) -> Iterator[None]:
        """Record a collective that exchanges gradients, and that the rank waits for, inside the context."""
        if self._of_step is None:
            yield
            return
        transfer = self._ready(gradients)
        yield
        transfer.arrived = Moment(self._device)

    def _ready(self, gradients: Tensor) -> Transfer:
        """Record that gradients are ready to travel."""
        assert self._of_step is not None, "a step has begun"
        transfer = Transfer(Moment(self._device), gradients.nbytes)
        self._of_step.append(transfer)
        return transfer

    def _arrived(self, transfer: Transfer, sent: torch.futures.Future[Tensor]) -> Tensor:
        """Record that the average has arrived, and return it."""
        # On a GPU torch calls this before the collective has ended. The current stream is then one that waits
        # for it, so that the event which Moment records completes when the gradients have arrived.
        average = sent.value()
        transfer.arrived = Moment(self._device)
        return average
