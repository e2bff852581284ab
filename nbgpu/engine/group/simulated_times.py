"""How long each kind of collective takes on a link of given latency and rate.

The formulas are those of nccl-tests' busbw and of NCCL's two algorithms: a ring, in which each link carries
the fewest bytes, and a tree, which has the fewest steps. As NCCL does, the faster one counts.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Literal

from nbgpu.machine.links import Link

Operation = Literal[
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "send",
]


def seconds(operation: Operation, num_bytes: float, world_size: int, link: Link) -> float:
    """Return the time from the moment when the last rank has come until every rank has its result.

    Args:
        operation: the kind of collective.
        num_bytes: the size of the whole: the tensor itself, or the parts of all ranks together where each
            rank has or gets a part of its own.
        world_size: the number of ranks in the group.
        link: the link from each rank to the next. Both directions carry data at the same time.
    """
    if world_size == 1:
        return 0.0
    neighbours = world_size - 1
    depth = ceil(log2(world_size))
    """The steps from the root of a binary tree to its furthest rank."""
    whole_s = num_bytes / link.bytes_per_s
    shares_s = whole_s * neighbours / world_size
    match operation:
        case "all_reduce":
            return min(
                2 * neighbours * link.latency_s + 2 * shares_s, 2 * depth * link.latency_s + 2 * whole_s
            )
        case "broadcast" | "reduce":
            # In a tree whose data go down in small pieces, or a ring: the pieces follow each other closely.
            return depth * link.latency_s + whole_s
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return neighbours * link.latency_s + shares_s
        case "gather" | "scatter":
            # The root's link carries the parts of all others.
            return link.latency_s + shares_s
        case "barrier":
            return 2 * depth * link.latency_s
        case "send":
            return link.seconds(num_bytes)
