"""Imitates the memory of fully_shard on one of any number of ranks, without other ranks and without values.

As torch's FSDP2 (torch/distributed/fsdp/_fully_shard, 2.13), it gathers the parts of the model one at a time,
first into one buffer and from there into a tensor for each weight. In the forward pass the buffer of one part
is freed once the buffer of the next part is allocated. In the backward pass the next part is gathered while
one computes, and gradients are copied into one buffer before they are scattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nbgpu.engine.model.strategy import Strategy


class FakeShards(Strategy):
    """A strategy that takes the place of `nbgpu.engine.model.strategy.Sharded` in an estimate: it allocates
    the memory that FSDP allocates on one rank, and exchanges nothing.

    Args:
        model: the model, whose weights have no values. They stand for the gathered weights, which are
            allocated here, and so the caller must not count their memory.
        blocks: the parts that are gathered one at a time.
        world_size: the number of ranks to share among.
        note: is called with the tensors that are allocated for communication, to label their memory.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        world_size: int,
        note: Callable[[list[Tensor]], None],
    ) -> None:
        self.replica = model
        self._note = note
        in_blocks = {id(p) for block in blocks for p in block.parameters()}
        rest = [p for p in model.parameters() if id(p) not in in_blocks]
        self._root = _FsdpUnit(rest, world_size, note)
        self._parts = [_FsdpUnit(list(block.parameters()), world_size, note) for block in blocks]
        self._scatters_now = True
        self._order: list[_FsdpUnit] = []
        """The parts in the order of the forward pass."""
        self._buffer_to_free: Tensor | None = None
        """The buffer of the part gathered last, which the forward pass frees once that of the next one is
        filled."""
        self._scatter_buffer: Tensor | None = None
        self._waiting: list[_FsdpUnit] = []
        """The parts whose gradients are scattered when the backward pass is over."""
        for part, block in zip(self._parts, blocks, strict=True):
            self._watch(part, block)
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self._end_forward())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's shards."""
        return [shard for part in (self._root, *self._parts) for shard in part.shards]

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Scatter the gradients of the next backward pass, or add them up whole."""
        self._scatters_now = now
        return nullcontext()

    def backward_is_over(self) -> None:
        """Scatter the gradients that no hook has scattered: of the weights outside of blocks, and of blocks
        whose inputs need no gradient."""
        for part in [*self._waiting, self._root]:
            self._scatter(part)
        self._waiting = []
        self._scatter_buffer = None

    def _watch(self, part: _FsdpUnit, block: nn.Module) -> None:
        """Register hooks on a block so that its weights are gathered and freed, and its gradients scattered,
        at the moments at which FSDP2 does it: around its forward pass, and before and after its backward
        pass."""

        def before_forward(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            """Gather the block's weights, and have its gradients scattered when those of its inputs are
            known."""
            self._gather_in_forward(part)
            self._order.append(part)
            places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
            # Without an input that needs a gradient no hook runs after this block's backward pass.
            if not places:
                self._waiting.append(part)
                return args
            watched = _AfterBackward.apply(  # type: ignore[no-untyped-call]
                lambda: self._scatter(part), *(args[place] for place in places)
            )
            new_args = list(args)
            for place, tensor in zip(places, watched, strict=True):
                new_args[place] = tensor
            return tuple(new_args)

        def before_backward(_: Tensor) -> None:
            """Gather the part's weights again, and prefetch those of the part whose backward pass is next."""
            part.copy_weights()
            # FSDP has copied the weights out of the buffer, which it frees at once in the backward pass.
            part.buffer = None
            # The backward pass visits the parts in the reverse order of the forward pass.
            position = self._order.index(part)
            if position:
                self._order[position - 1].fill_buffer()

        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            part.forget_gathered()
            for tensor in output if isinstance(output, tuple | list) else [output]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(before_backward)

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    def _begin(self) -> None:
        self._order = []
        self._gather_in_forward(self._root)

    def _gather_in_forward(self, part: _FsdpUnit) -> None:
        """Gather a part's weights before its forward pass; FSDP frees the buffer of the part before only once
        this one's buffer is filled."""
        part.fill_buffer()
        self._buffer_to_free = None
        part.copy_weights()
        self._buffer_to_free, part.buffer = part.buffer, None

    def _end_forward(self) -> None:
        self._buffer_to_free = None

    def _scatter(self, part: _FsdpUnit) -> None:
        """Allocate what FSDP allocates to scatter the gradients of a part, free the whole gradients, and give
        the shards theirs. With `exchange(now=False)` the whole gradients stay."""
        part.forget_gathered()
        if not self._scatters_now:
            return
        gradients = [p.grad for p in part.whole if p.grad is not None]
        if not gradients:
            return
        self._scatter_buffer = None
        num_elements = part.num_elements_with_gradient
        self._scatter_buffer = torch.empty(num_elements, dtype=gradients[0].dtype, device=gradients[0].device)
        self._note([self._scatter_buffer])
        del gradients
        for parameter in part.whole:
            parameter.grad = None
        part.take_gradients()
        if self._scatter_buffer.device.type == "cpu":
            # gloo adds up the gradients in a copy.
            self._note([torch.empty_like(self._scatter_buffer)])


class _AfterBackward(torch.autograd.Function):
    """Calls a function when the gradients of all its tensors are known."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *gradients


class _FsdpUnit:
    """The weights that FSDP gathers together: those of a block, or those outside of all blocks.

    Args:
        whole: the weights of the model, without values; they get the gradients of the backward pass.
        world_size: the number of ranks to shard over.
        note: is called with the tensors that are allocated for communication.
    """

    def __init__(
        self, whole: list[nn.Parameter], world_size: int, note: Callable[[list[Tensor]], None]
    ) -> None:
        self.whole = whole
        self._note = note
        self.shards = [
            nn.Parameter(
                torch.empty(_shard_shape(p.shape, world_size), dtype=p.dtype, device=p.device),
                requires_grad=p.requires_grad,
            )
            for p in whole
        ]
        self._world_size = world_size
        self.padded = world_size * sum(shard.numel() for shard in self.shards)
        """The number of elements of all ranks' shards, which are filled up to the same size."""
        self.buffer: Tensor | None = None
        self._gathered: list[Tensor] = []

    @property
    def num_elements_with_gradient(self) -> int:
        """The number of elements of all ranks' shards of the weights that have a gradient now."""
        with_gradient = (s for p, s in zip(self.whole, self.shards, strict=True) if p.grad is not None)
        return self._world_size * sum(shard.numel() for shard in with_gradient)

    def fill_buffer(self) -> None:
        """Allocate the buffer into which the weights are gathered, unless it is there, they are gathered
        already, or there is nothing to gather: no weights, or a single rank."""
        if self._world_size > 1 and self.shards and self.buffer is None and not self._gathered:
            like = self.shards[0]
            self.buffer = torch.empty(self.padded, dtype=like.dtype, device=like.device)
            self._note([self.buffer])

    def copy_weights(self) -> None:
        """Allocate a tensor for each gathered weight, into which FSDP copies it from the buffer."""
        if self._gathered:
            return
        self.fill_buffer()
        self._gathered = [
            torch.empty(self._world_size * shard.numel(), dtype=shard.dtype, device=shard.device)
            for shard in self.shards
        ]
        self._note(self._gathered)

    def forget_gathered(self) -> None:
        """Free the gathered weights."""
        self._gathered = []

    def take_gradients(self) -> None:
        """Allocate the gradients of the shards, which are views of one tensor."""
        trained = [shard for shard in self.shards if shard.requires_grad]
        flat = torch.empty(
            sum(shard.numel() for shard in trained), dtype=trained[0].dtype, device=trained[0].device
        )
        for shard, part in zip(trained, flat.split([shard.numel() for shard in trained]), strict=True):
            shard.grad = part.view(shard.shape)


def _shard_shape(shape: torch.Size, world_size: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard of a weight: sharded along the first axis, with the same size on all
    ranks."""
    if not shape:
        return ()
    return (math.ceil(shape[0] / world_size), *shape[1:])
