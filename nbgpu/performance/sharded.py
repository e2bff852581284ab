"""A model of how FSDP gathers weights and scatters gradients while the ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbgpu.performance.schedule import Exchange, Timing


@dataclass(frozen=True)
class ShardedBlock:
    """A part of the model that is gathered and scattered as one."""

    num_bytes: float
    """Its weights, and its gradients."""
    forward_s: float


def play(
    blocks: Sequence[ShardedBlock],
    rest_bytes: float,
    forward_s: float,
    backward_s: float,
    gather: Timing,
    scatter: Timing,
    overlaps: bool,
) -> Exchange:
    """Play one forward and one backward pass of FSDP2's `fully_shard` through.

    All collectives go through one queue, in the order in which FSDP2 issues them. With a GPU, a block is
    gathered while the one before it computes, in both passes, and its gradients are scattered while the next
    one computes; a block's gradients are scattered before those of the next one may be (torch's
    `_fsdp_param_group.py`: at most one input of a reduce_scatter is kept). On CPU ranks nothing overlaps,
    because there are no streams, and every collective is waited for.

    Args:
        blocks: in the order of the forward pass.
        rest_bytes: the weights outside of all blocks, which stay gathered from the forward pass on.
        forward_s: of the whole model by itself; what is not in the blocks comes after them.
        backward_s: of the whole model by itself, shared by the blocks as the forward pass is.
        gather: the time of an all_gather.
        scatter: the time of a reduce_scatter.
        overlaps: whether collectives go on while the ranks compute.

    Returns:
        All collectives, from the beginning of the forward pass. Its `backward_s` is that of both passes.
    """
    sent: list[tuple[float, float]] = []

    def send(ready_s: float, num_bytes: float, timing: Timing) -> float:
        begin_s = max(ready_s, sent[-1][1] if sent else 0.0)
        sent.append((begin_s, begin_s + sum(timing(num_bytes))))
        return sent[-1][1]

    now_s = send(0.0, rest_bytes, gather) if rest_bytes else 0.0
    previous_s = now_s  # when the block before began to compute
    for block in blocks:
        now_s = max(now_s, send(previous_s if overlaps else now_s, block.num_bytes, gather))
        previous_s = now_s
        now_s += block.forward_s
    now_s += forward_s - sum(block.forward_s for block in blocks)

    slower = backward_s / forward_s
    previous_s = now_s
    now_s += slower * (forward_s - sum(block.forward_s for block in blocks))
    scattered_s = 0.0
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
    # The pass ends with the last gradients, whose block computes until they are sent.
    return Exchange(tuple(sent), forward_s + backward_s)
