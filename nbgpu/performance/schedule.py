"""A model of how DDP's buckets travel while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NO_TIME_S = 1e-12

Timing = Callable[[float], tuple[float, float]]
"""For bytes, the latency of a collective and the time that its bytes take if it has the link to itself."""


def line(latency_s: float, bytes_per_s: float) -> Timing:
    """The same latency for all sizes, and bytes at a rate."""
    return lambda num_bytes: (latency_s, num_bytes / bytes_per_s)


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together."""

    ready_s: float
    """The time from the beginning of the backward pass until the gradients are there."""
    num_bytes: float


@dataclass(frozen=True)
class Exchange:
    """When the buckets of one step travel, in seconds from the beginning of the backward pass."""

    sent: tuple[tuple[float, float], ...]
    """By bucket, the times at which it begins to travel and at which all ranks have it."""
    backward_s: float
    """The time of the backward pass by itself."""

    @property
    def ended_s(self) -> float:
        """The time at which both the backward pass and the exchange have ended."""
        return max([self.backward_s, *(end for _, end in self.sent)])

    @property
    def busy_s(self) -> float:
        """The time in which at least one bucket travels."""
        busy_s = until_s = 0.0
        for begin, end in sorted(self.sent):
            busy_s += max(0.0, end - max(begin, until_s))
            until_s = max(until_s, end)
        return busy_s

    @property
    def exposed_s(self) -> float:
        """The time for which the ranks wait when the backward pass has ended."""
        return self.ended_s - self.backward_s

    @property
    def hidden_s(self) -> float:
        """The part of the exchange that happens while the ranks compute."""
        return max(0.0, self.busy_s - self.exposed_s)


def play(
    buckets: Sequence[Bucket], backward_s: float, timing: Timing, at_once: int = 1, gain: float = 1.0
) -> Exchange:
    """Play the exchange of one step through.

    A bucket travels when it is ready and one of `at_once` places is free, first come, first served. It needs
    the latency, and then the time of its bytes, for which those that travel share the link.

    Args:
        buckets: in the order in which they become ready.
        backward_s: the time of the backward pass by itself.
        timing: of one all_reduce.
        at_once: how many buckets travel at the same time: 1 with NCCL, which has one queue, and 2 with gloo,
            which has two threads.
        gain: by what factor several at once are faster in all than one.
    """
    begun_s = [0.0] * len(buckets)
    ended_s = [0.0] * len(buckets)
    waiting = list(range(len(buckets)))
    latency_left: dict[int, float] = {}
    transfer_left: dict[int, float] = {}
    now_s = 0.0
    while waiting or latency_left or transfer_left:
        while waiting and len(latency_left) + len(transfer_left) < at_once:
            if buckets[waiting[0]].ready_s > now_s + _NO_TIME_S:
                break
            bucket = waiting.pop(0)
            begun_s[bucket] = now_s
            latency_left[bucket] = timing(buckets[bucket].num_bytes)[0]
        share = (gain if len(transfer_left) > 1 else 1.0) / max(1, len(transfer_left))
        next_s = list(latency_left.values())
        next_s += [left / share for left in transfer_left.values()]
        if waiting and len(latency_left) + len(transfer_left) < at_once:
            next_s.append(buckets[waiting[0]].ready_s - now_s)
        passed_s = max(0.0, min(next_s))
        now_s += passed_s
        for bucket in list(transfer_left):
            transfer_left[bucket] -= share * passed_s
            if transfer_left[bucket] <= _NO_TIME_S:
                del transfer_left[bucket]
                ended_s[bucket] = now_s
        for bucket in list(latency_left):
            latency_left[bucket] -= passed_s
            if latency_left[bucket] <= _NO_TIME_S:
                del latency_left[bucket]
                transfer_left[bucket] = timing(buckets[bucket].num_bytes)[1]
    return Exchange(tuple(zip(begun_s, ended_s, strict=True)), backward_s)
