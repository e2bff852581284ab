"""Simulations of the exchange of DDP's buckets during the backward pass, and of FSDP's collectives, which
gather weights and scatter gradients while the ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NO_TIME_S = 1e-12

Timing = Callable[[float], tuple[float, float]]
"""Computes from a tensor's bytes (latency, transfer time) of a collective that has the link to itself, in
seconds."""


def fixed_timing(latency_s: float, bytes_per_s: float) -> Timing:
    """Return the timing of a link with a fixed latency and rate."""
    return lambda num_bytes: (latency_s, num_bytes / bytes_per_s)


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all_reduce exchanges."""

    ready_s: float
    """The time from the beginning of the backward pass until the gradients are computed."""
    num_bytes: float


@dataclass(frozen=True)
class Exchange:
    """When the buckets of one step travel, in seconds from the beginning of the backward pass."""

    sent: tuple[tuple[float, float], ...]
    """For each bucket, the times at which its all_reduce begins and at which all ranks have the result."""
    backward_s: float
    """The time of the backward pass without the exchange."""

    @property
    def ended_s(self) -> float:
        """The time at which both the backward pass and the exchange have ended."""
        return max([self.backward_s, *(end for _, end in self.sent)])

    @property
    def busy_s(self) -> float:
        """The time in which at least one bucket is being exchanged."""
        busy_s = until_s = 0.0
        for begin, end in sorted(self.sent):
            busy_s += max(0.0, end - max(begin, until_s))
            until_s = max(until_s, end)
        return busy_s

    @property
    def exposed_s(self) -> float:
        """The time for which the ranks wait after the backward pass has ended."""
        return self.ended_s - self.backward_s

    @property
    def hidden_s(self) -> float:
        """The part of the exchange that overlaps with computation."""
        return max(0.0, self.busy_s - self.exposed_s)


def play(
    buckets: Sequence[Bucket], backward_s: float, timing: Timing, at_once: int = 1, gain: float = 1.0
) -> Exchange:
    """Simulate the all_reduces of one step's buckets, from event to event.

    An all_reduce begins when its bucket is ready and fewer than `at_once` others run, first come, first
    served. It takes the latency and then the time of its bytes; concurrent transfers share the link.

    Args:
        buckets: in the order in which they become ready.
        backward_s: the time of the backward pass without the exchange.
        timing: the timing of one all_reduce.
        at_once: the number of all_reduces that run at the same time: 1 with NCCL, which has one queue, and 2
            with gloo, which has two threads.
        gain: the total rate of several concurrent transfers, divided by the rate of one.
    """
    begun_s = [0.0] * len(buckets)
    ended_s = [0.0] * len(buckets)
    waiting = list(range(len(buckets)))
    # By the index of a bucket: the seconds of latency that are left, and then those of the transfer.
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
        # The share of the link's rate that each transfer has.
        share = (gain if len(transfer_left) > 1 else 1.0) / max(1, len(transfer_left))
        # The time until the next event: a latency or a transfer ends, or the next all_reduce can begin.
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


@dataclass(frozen=True)
class ShardedBlock:
    """A part of the model whose weights FSDP gathers, and whose gradients it scatters, in one collective."""

    num_bytes: float
    """The bytes of its weights, which are also those of its gradients."""
    forward_s: float


def play_sharded(
    blocks: Sequence[ShardedBlock],
    rest_bytes: float,
    forward_s: float,
    backward_s: float,
    gather: Timing,
    scatter: Timing,
    overlaps: bool,
) -> Exchange:
    """Simulate one forward and one backward pass of FSDP2's `fully_shard`.

    All collectives go through one queue, in the order in which FSDP2 issues them. On a GPU, in both passes, a
    block is gathered while the block before it computes, and its gradients are scattered while the next one
    computes. The reduce_scatter of a block ends before that of the next block begins (torch's
    `_fsdp_param_group.py` keeps at most one input of a reduce_scatter). On CPU ranks nothing overlaps:
    without streams, every collective is waited for.

    Args:
        blocks: in the order of the forward pass.
        rest_bytes: the weights outside of all blocks, which stay gathered from the forward pass on.
        forward_s: the forward pass of the whole model without collectives. Layers outside of the blocks
            count as the last ones.
        backward_s: the backward pass of the whole model without collectives, divided among the blocks in
            proportion to their forward times.
        gather: the timing of an all_gather.
        scatter: the timing of a reduce_scatter.
        overlaps: whether collectives run while the ranks compute.

    Returns:
        All collectives, in seconds from the beginning of the forward pass. The exchange's `backward_s` is the
        time of both passes.
    """
    sent: list[tuple[float, float]] = []

    def send(ready_s: float, num_bytes: float, timing: Timing) -> float:
        begin_s = max(ready_s, sent[-1][1] if sent else 0.0)
        sent.append((begin_s, begin_s + sum(timing(num_bytes))))
        return sent[-1][1]

    now_s = send(0.0, rest_bytes, gather) if rest_bytes else 0.0
    previous_s = now_s  # the time at which the previous block began to compute
    for block in blocks:
        now_s = max(now_s, send(previous_s if overlaps else now_s, block.num_bytes, gather))
        previous_s = now_s
        now_s += block.forward_s
    now_s += forward_s - sum(block.forward_s for block in blocks)

    # The backward pass goes through the model in reverse: first the layers after the blocks.
    slower = backward_s / forward_s
    previous_s = now_s
    now_s += slower * (forward_s - sum(block.forward_s for block in blocks))
    scattered_s = 0.0  # the time at which the last reduce_scatter ended
    gathered_s = send(previous_s if overlaps else now_s, blocks[-1].num_bytes, gather) if blocks else 0.0
    for index in reversed(range(len(blocks))):
        begun_s = now_s = max(now_s, gathered_s)
        if index and overlaps:
            gathered_s = send(begun_s, blocks[index - 1].num_bytes, gather)
        now_s = max(now_s + slower * blocks[index].forward_s, scattered_s)
        scattered_s = send(now_s, blocks[index].num_bytes, scatter)
        if not overlaps:
            now_s = scattered_s
            if index:
                gathered_s = send(now_s, blocks[index - 1].num_bytes, gather)
    if rest_bytes:
        scattered_s = send(now_s, rest_bytes, scatter)
    # `Exchange.exposed_s` is what the collectives add to the computation of both passes.
    return Exchange(tuple(sent), forward_s + backward_s)
