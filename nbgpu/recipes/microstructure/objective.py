"""The loss of a whole field and its gradient, computed by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nbgpu.engine.workload.shards import Shards, all_gather, share_of
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import slice_stacks, slices_along

MAX_PIXELS_AT_ONCE = 2**15
"""The largest number of pixels of the slices whose autograd graph is in memory at one time: Correlations with
limit_to=16 compute 481 values for each pixel, and keep them three times."""


@dataclass(frozen=True)
class _Part:
    """The part that a rank computes for one direction: the losses (n,) of its slices and their gradients (n,
    P, H, W)."""

    losses: Tensor
    gradient: Tensor


class Objective:
    """The sum of a loss over all slices of a volume in its three directions, or the loss of a picture.

    The ranks share the slices. Nothing is reduced across ranks: each rank gathers the losses and gradients of
    all slices and sums them in the order of the slices. So the loss and the gradient are the same to the last
    bit on every rank and for any number of ranks, and so are the optimizer's steps.

    Args:
        loss: the loss of a slice.
        rank, world_size: determine the rank's share of the slices. With more than one rank a call is a
            collective.
        num_drawn: the number of slices in each direction of a volume that a call evaluates, drawn for each
            step; None for all. Loss and gradient are scaled up to all slices, so that they are right on
            average.
        seed: the seed of the draws.
    """

    def __init__(
        self,
        loss: Loss,
        rank: int = 0,
        world_size: int = 1,
        num_drawn: int | None = None,
        seed: int = 0,
    ) -> None:
        """Keep the loss, and this rank's place among the ranks that share the slices."""
        self._loss = loss
        self._rank = rank
        self._world_size = world_size
        self._num_drawn = num_drawn
        self._seed = seed

    def __call__(self, field: Tensor, coarser: int = 0, step: int = 0) -> tuple[Tensor, Tensor]:
        """Compute the loss and its gradient. A collective with several ranks.

        Args:
            field: the values of each phase, (P, H, W) or (P, D, H, W).
            coarser: how many times the resolution of the field was halved relative to the target.
            step: determines which slices are drawn if not all are evaluated.

        Returns:
            A scalar, and a tensor of the shape of the field; both are the same on all ranks.
        """
        # A stack of slices (N, P, ...) for each direction, and the indices of the slices to evaluate.
        stacks = slice_stacks(field)
        indices = [self._draw_slices(len(stack), direction, step) for direction, stack in enumerate(stacks)]
        evaluated = [stack if i is None else stack[i] for stack, i in zip(stacks, indices, strict=True)]
        local_parts = [
            self._local_part(stack, direction, coarser) for direction, stack in enumerate(evaluated)
        ]
        parts = local_parts
        if self._world_size > 1:
            parts = [self._gather_part(*pair) for pair in zip(local_parts, evaluated, strict=True)]
        # Slices that are not drawn count as much as the mean of those that are.
        scales = [len(stack) / len(drawn) for stack, drawn in zip(stacks, evaluated, strict=True)]
        loss = torch.cat([part.losses * factor for part, factor in zip(parts, scales, strict=True)]).sum()
        if field.ndim == 3:
            return loss, parts[0].gradient[0]
        # A voxel is in a slice of each direction, so its gradients add up.
        gradient = torch.zeros_like(field)
        for direction, (part, selected, factor) in enumerate(zip(parts, indices, scales, strict=True)):
            slices = slices_along(gradient, direction)
            if selected is None:
                slices += part.gradient
            else:
                slices[selected] += part.gradient * factor
        return loss, gradient

    def part(self, field: Tensor, shards: Shards, coarser: int = 0) -> tuple[float, Tensor]:
        """Compute (loss, this rank's shard of the gradient) over all slices. A collective with several ranks.

        No rank holds the whole gradient: the ranks exchange the gradients of their slices, so that each
        receives its own shard. The shard equals that of the whole gradient, as a call of the objective
        returns it, to the last bit.

        Args:
            field: the whole field, (P, H, W) or (P, D, H, W).
            shards: the division of the field over the ranks.
            coarser: how many times the resolution of the field was halved relative to the target.
        """
        stacks = slice_stacks(field)
        gradient = field.new_zeros(len(shards.share), shards.num_in_slice)
        shard_stacks = slice_stacks(shards.view(gradient))
        losses = []
        for direction, (stack, shard_stack) in enumerate(zip(stacks, shard_stacks, strict=True)):
            local = self._local_part(stack, direction, coarser)
            losses.append(gather_rows(local.losses.cpu(), len(stack), self._world_size))
            # A volume is sharded along its first direction, so each slice across it lies on one rank.
            if self._world_size == 1 or (direction == 0 and field.ndim > 3):
                shard_stack += local.gradient
                continue
            for share, received in self._exchange_gradients(local.gradient, len(stack), shards):
                shard_stack[share.start : share.stop] += received
        # fsum rounds only once, so the loss is the same on every processor. The ranks decide by it whether to
        # accept a step, and must decide alike.
        return math.fsum(torch.cat(losses).tolist()), gradient

    def _exchange_gradients(
        self, gradient: Tensor, num_slices: int, shards: Shards
    ) -> Iterator[tuple[range, Tensor]]:
        """Send each rank its shard of the gradients of this rank's slices, and receive this rank's shard of
        the gradients of all slices. A collective (all-to-all).

        Args:
            gradient: the gradients of this rank's slices (n, P, L, ...), where L is the axis along which the
                field is sharded.
            num_slices: the number of slices of all ranks.
            shards: the division of the field over the ranks.

        Yields:
            For each rank, the range of its slices, and this rank's shard of their gradients.
        """
        ranks = range(self._world_size)
        lengths = [share_of(shards.shape[1], rank, self._world_size) for rank in ranks]
        shares = [share_of(num_slices, rank, self._world_size) for rank in ranks]
        parts = [gradient[:, :, length.start : length.stop] for length in lengths]
        sizes = [part.numel() for part in parts]
        message = gradient.new_empty(sum(sizes))
        for part, section in zip(parts, message.split(sizes), strict=True):
            section.view(part.shape).copy_(part)
        shape = (gradient.shape[1], len(shards.share), *gradient.shape[3:])
        received_sizes = [len(share) * math.prod(shape) for share in shares]
        sent = message.cpu() if dist.get_backend() == "gloo" else message
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sizes)
        for share, numbers in zip(shares, received.to(gradient.device).split(received_sizes), strict=True):
            yield share, numbers.view(len(share), *shape)

    def _draw_slices(self, num_slices: int, direction: int, step: int) -> Tensor | None:
        """Return the indices of the slices to evaluate, None for all; the same on all ranks."""
        if self._num_drawn is None or self._num_drawn >= num_slices:
            return None
        draw = np.random.default_rng((self._seed, step, direction))
        return torch.from_numpy(np.sort(draw.permutation(num_slices)[: self._num_drawn]))

    def _local_part(self, stack: Tensor, direction: int, coarser: int) -> _Part:
        """Compute the losses and gradients of this rank's share of a stack of slices (N, P, H, W), as many at
        a time as have at most MAX_PIXELS_AT_ONCE values, but at least one."""
        share = share_of(len(stack), self._rank, self._world_size)
        slices = stack[share.start : share.stop].detach()
        losses, gradient = slices.new_empty(len(slices)), slices.new_empty(slices.shape)
        at_once = max(1, MAX_PIXELS_AT_ONCE // stack[0].numel())
        for begin in range(0, len(slices), at_once):
            selected = slice(begin, begin + at_once)
            some = slices[selected].contiguous().requires_grad_()
            with torch.enable_grad():
                slice_losses = self._loss(some, direction, coarser)
            (gradient[selected],) = torch.autograd.grad(slice_losses.sum(), some)
            losses[selected] = slice_losses.detach()
        return _Part(losses, gradient)

    def _gather_part(self, local: _Part, stack: Tensor) -> _Part:
        """Return the losses and gradients of all ranks' slices in a stack (N, P, H, W). A collective."""
        rows = torch.cat([local.losses[:, None], local.gradient.flatten(1)], dim=1)
        rows = gather_rows(rows, len(stack), self._world_size)
        return _Part(rows[:, 0], rows[:, 1:].reshape(stack.shape))


def gather_rows(rows: Tensor, num_rows: int, world_size: int) -> Tensor:
    """Return the rows (num_rows, ...) of all ranks in order, on every rank. A collective with several ranks.

    Args:
        rows: the rows of this rank's `share_of`, (n, ...).
        num_rows: the number of rows of all ranks.
        world_size: the number of ranks.
    """
    if world_size == 1:
        return rows
    # all_gather takes tensors of one size. Only the last shares are shorter, so all padding is at the end.
    largest = len(share_of(num_rows, 0, world_size))
    padded = rows.new_zeros(largest, *rows.shape[1:])
    padded[: len(rows)] = rows
    sent = padded.cpu() if dist.get_backend() == "gloo" else padded
    received = sent.new_empty(world_size * largest, *rows.shape[1:])
    all_gather(received, sent)
    return received[:num_rows].to(rows.device)
