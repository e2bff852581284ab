"""When each of DDP's buckets of a step was ready, and when it had arrived."""

from __future__ import annotations

import torch
from torch import Tensor

from nbgpu.engine.model.bucket_hooks import BucketHook, Sent
from nbgpu.engine.model.moments import Moment


class BucketTimes:
    """The moments of the buckets of one step.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ready: list[Moment] = []
        """By bucket, in the order in which the backward pass has filled them."""
        self.arrived: list[Moment] = []
        """In the order in which their averages came. A bucket that did not come is missing."""

    def begin(self) -> None:
        """Forget the step before. Its moments stay with whoever has taken them."""
        self.ready, self.arrived = [], []

    def noting(self, hook: BucketHook) -> BucketHook:
        """Return a hook that sends as `hook` does and notes the moments."""
        # A lambda, because torch refuses a hook whose annotations are strings, as those of this module are.
        return lambda _, bucket: self._noted(hook, bucket)

    def _noted(self, hook: BucketHook, bucket: object) -> Sent:
        self.ready.append(Moment(self._device))
        arrived = self.arrived
        averaged: Sent = hook(None, bucket).then(lambda sent: self._take(arrived, sent))
        return averaged

    def _take(self, arrived: list[Moment], sent: Sent) -> Tensor:
        # On a GPU torch calls this with a stream current that waits for the transfer.
        average = sent.value()
        arrived.append(Moment(self._device))
        return average
