"""Where the time of a training step goes on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from nbgpu.engine.model.bucket_times import BucketTimes
from nbgpu.engine.model.moments import Moment

_PARTS = ("forward", "backward", "optimizer")
_STEPS_BETWEEN_ANCHORS = 256
"""On a GPU the host's and the device's clock are compared once in so many steps, because the host has to wait
for the device to do that."""


class Anchor:
    """A moment of the device whose time on the host's monotonic clock is known."""

    def __init__(self, device: torch.device) -> None:
        self.moment = Moment(device)
        self.moment.wait()
        self.time_s = time.perf_counter()


class StepClock:
    """Notes the moments of one step, to be read later.

    Args:
        device: the rank's device.
        buckets: notes the moments of DDP's buckets; None where gradients travel in another way, or not at
            all.
        anchor: an earlier moment of the device.
        is_on_one_host: whether all ranks share this host's clock.
    """

    def __init__(
        self, device: torch.device, buckets: BucketTimes | None, anchor: Anchor, is_on_one_host: bool
    ) -> None:
        self._device = device
        self._anchor = anchor
        self._is_on_one_host = is_on_one_host
        self._marks: list[tuple[str, Moment]] = []
        self._ready: Sequence[Moment] = ()
        self._arrived: Sequence[Moment] = ()
        if buckets is not None:
            buckets.begin()
            self._ready, self._arrived = buckets.ready, buckets.arrived

    def enter(self, part: str) -> None:
        """Note that a part of the step begins, and with it that the one before ends."""
        self._marks.append((part, Moment(self._device)))

    def seconds(self) -> dict[str, float]:
        """Return what the parts took; wait until the device has done them.

        Returns:
            `forward_s`, `backward_s` and `optimizer_s`, summed over the micro-batches, and the step's
            `begun_at_s`. Where DDP sends buckets also `exchange_s`, the time in which at least one bucket was
            ready and had not arrived; `hidden_s`, the part of it before this rank's last gradients were
            ready; `exposed_s`, from then until the averages of all ranks were there, which the backward pass
            does not contain; and, if all ranks are on one host, `ready_at_s`, when this rank's last gradients
            were ready. Times with `_at_` are those of the host's monotonic clock.
        """
        self._marks[-1][1].wait()
        seconds = {f"{part}_s": 0.0 for part in _PARTS}
        last_backward: tuple[Moment, Moment] | None = None
        for (part, begin), (_, end) in pairwise(self._marks):
            if part in _PARTS:
                seconds[f"{part}_s"] += begin.seconds_until(end)
            if part == "backward":
                last_backward = begin, end
        found = {**seconds, "begun_at_s": self._at(self._marks[0][1])}
        if last_backward is None or not self._ready or len(self._arrived) < len(self._ready):
            return found
        begin, end = last_backward
        ready_s = [begin.seconds_until(moment) for moment in self._ready]
        arrived_s = sorted(begin.seconds_until(moment) for moment in self._arrived)
        exposed_s = max(0.0, begin.seconds_until(end) - ready_s[-1])
        # Buckets arrive in the order in which they were sent, but for small differences between threads.
        travels = list(zip(sorted(ready_s), arrived_s, strict=True))
        if self._is_on_one_host:
            # The clocks of two hosts have nothing to do with each other.
            found["ready_at_s"] = self._at(self._ready[-1])
        return {
            **found,
            "backward_s": seconds["backward_s"] - exposed_s,
            "exchange_s": _covered_s(travels),
            "hidden_s": _covered_s([(since, min(until, ready_s[-1])) for since, until in travels]),
            "exposed_s": exposed_s,
        }

    def _at(self, moment: Moment) -> float:
        """The time of a moment on the host's monotonic clock."""
        return self._anchor.time_s + self._anchor.moment.seconds_until(moment)


class StepClocks:
    """Makes the clock of each step.

    Args:
        device: the rank's device.
        is_on_one_host: whether all ranks share this host's clock.
    """

    def __init__(self, device: torch.device, is_on_one_host: bool) -> None:
        self._device = device
        self._is_on_one_host = is_on_one_host
        self._anchor: Anchor | None = None
        self._num_since_anchor = 0

    def next(self, buckets: BucketTimes | None) -> StepClock:
        """Return the clock of a step that begins."""
        if self._anchor is None or self._num_since_anchor == _STEPS_BETWEEN_ANCHORS:
            self._anchor, self._num_since_anchor = Anchor(self._device), 0
        self._num_since_anchor += 1
        return StepClock(self._device, buckets, self._anchor, self._is_on_one_host)


def _covered_s(intervals: Sequence[tuple[float, float]]) -> float:
    """The time that lies in at least one of the intervals."""
    covered_s, until_s = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered_s += max(0.0, end - max(begin, until_s))
        until_s = max(until_s, end)
    return covered_s
