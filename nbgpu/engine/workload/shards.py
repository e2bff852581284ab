"""The division of a tensor among the ranks by its slices, and the sums that all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# The function's names from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_NUMBERS_AT_ONCE = 2**14
"""The number of elements of a piece, the slices that are worked on together, unless one slice has more."""


def share_of(num_slices: int, rank: int, world_size: int) -> range:
    """Return the range of slices of a rank: contiguous and of equal size on all ranks, but for the last
    ranks, which may have fewer or none."""
    size = -(-num_slices // world_size)
    return range(min(rank * size, num_slices), min((rank + 1) * size, num_slices))


def all_gather(received: Tensor, sent: Tensor) -> None:
    """Fill a tensor with what all ranks send, one after the other along its first axis. A collective."""
    _all_gather(received, sent)


class Shards:
    """The division of a tensor (C, L, ...) among the ranks: each has the slices along L of its `share_of`.

    A part is (number of the rank's slices, numbers of a slice), contiguous. With several ranks `whole`,
    `sums` and `smallest` are collectives.

    Every decision of a rank must follow from `sums` and `smallest`, which give the same numbers to the last
    bit on every rank, also on hosts with different processors. They do not depend on the number of ranks
    either, but for the rounding within a slice: they add up slice by slice, and not rank by rank.

    Args:
        shape: the shape of the whole tensor.
        rank, world_size: this rank, and the number of ranks.
    """

    def __init__(self, shape: Sequence[int], rank: int = 0, world_size: int = 1) -> None:
        self.shape = tuple(shape)
        self.rank = rank
        self.world_size = world_size
        self.share = share_of(shape[1], rank, world_size)
        self.num_in_slice = math.prod(shape) // shape[1]
        self._largest = len(share_of(shape[1], 0, world_size))
        """The number of slices of the rank that has most, to which all_gather's tensors are padded."""

    def part(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of a whole tensor."""
        part = torch.empty(len(self.share), self.num_in_slice, dtype=whole.dtype, device=whole.device)
        self.view(part).copy_(whole.detach()[:, self.share.start : self.share.stop])
        return part

    def view(self, part: Tensor) -> Tensor:
        """Return a part as (C, number of the rank's slices, ...): a view, in which it can be changed."""
        return part.view(len(self.share), self.shape[0], *self.shape[2:]).movedim(1, 0)

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole tensor (C, L, ...), gathered from the parts of all ranks. A collective."""
        if self.world_size == 1:
            joined = part.clone()
        else:
            padded = part
            if len(part) < self._largest:
                # all_gather takes tensors of one size.
                padded = part.new_zeros(self._largest, self.num_in_slice)
                padded[: len(part)] = part
            sent = padded.cpu() if dist.get_backend() == "gloo" else padded
            received = sent.new_empty(self.world_size * self._largest, self.num_in_slice)
            all_gather(received, sent)
            joined = received[: self.shape[1]].to(part.device)
        by_slice = joined.view(self.shape[1], self.shape[0], *self.shape[2:])
        return by_slice.movedim(1, 0).contiguous()

    def pieces(self) -> Iterator[slice]:
        """Yield the ranges of slices of this rank's part that are worked on together, so that intermediate
        results take little memory."""
        for begin in range(0, len(self.share), self.largest_piece):
            yield slice(begin, min(begin + self.largest_piece, len(self.share)))

    @property
    def largest_piece(self) -> int:
        """Return the largest number of slices that are worked on together."""
        return max(1, _NUMBERS_AT_ONCE // self.num_in_slice)

    def sums(self, by_slice: Tensor) -> np.ndarray:
        """Return the sums over the slices of all ranks, (K,).

        Args:
            by_slice: (number of this rank's slices, K), float64.
        """
        total = np.zeros(by_slice.shape[1])
        # Added slice by slice, because the rounding of numpy's and torch's sums depends on the processor.
        for row in self._gather(by_slice):
            total += row
        return total

    def smallest(self, by_slice: Tensor) -> float:
        """Return the smallest of all numbers of all ranks. A collective.

        Args:
            by_slice: (number of this rank's slices, K), float64.
        """
        return float(self._gather(by_slice).min())

    def _gather(self, by_slice: Tensor) -> np.ndarray:
        """Return the rows of all ranks' slices, (L, K), in order. A collective."""
        rows = by_slice.cpu()
        if self.world_size > 1:
            padded = rows.new_zeros(self._largest, rows.shape[1])
            padded[: len(rows)] = rows
            received = rows.new_empty(self.world_size * self._largest, rows.shape[1])
            # On the CPU, and so over gloo, with every kind of device: the numbers are few and needed there.
            all_gather(received, padded)
            rows = received[: self.shape[1]]
        numbers: np.ndarray = rows.numpy()
        return numbers
