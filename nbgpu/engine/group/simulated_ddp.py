"""Gives every DDP object a communication hook in Python, because the all_reduce in C++ cannot be held back.

A person may still register a hook of their own until the first forward pass, as without a simulated link.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.group import straggler, torch_private

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]

_with_hook: WeakSet[DistributedDataParallel] = WeakSet()


def give_every_ddp_a_hook() -> None:
    """Wrap DDP's methods so that every DDP object that is made from now on sends its buckets through a hook
    in Python, whose collectives can be held back."""
    make = DistributedDataParallel.__init__
    register = DistributedDataParallel.register_comm_hook
    forward = DistributedDataParallel.forward

    @functools.wraps(make)
    def make_without_hook(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        _with_hook.discard(self)  # an object that moves to another group is constructed again
        make(self, *args, **kwargs)

    @functools.wraps(register)
    def register_timed(self: DistributedDataParallel, state: object, hook: Hook) -> None:
        # torch checks the annotations of a hook. `wraps` gives it those of the wrapped one.
        register(self, state, functools.wraps(hook)(_slowed(hook)))
        _with_hook.add(self)

    @functools.wraps(forward)
    def forward_with_hook(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        # Only now, because DDP takes one hook, and until now the person may register theirs.
        if self not in _with_hook and dist.get_backend(self.process_group) != "fake":
            group = self.process_group
            register_timed(self, None, lambda _, bucket: average(group, bucket))
        return forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    def register_builtin(self: DistributedDataParallel, kind: Any) -> None:
        register_timed(self, self.process_group, in_python(kind))

    DistributedDataParallel.__init__ = make_without_hook  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_timed  # type: ignore[method-assign]
    DistributedDataParallel.forward = forward_with_hook  # type: ignore[method-assign]
    torch_private.replace_builtin_hooks(register_builtin)


def in_python(kind: Any) -> Hook:
    """Return the communication hook in Python for one of torch's hooks in C++
    (`dist.BuiltinCommHookType`)."""
    is_fp16 = kind == dist.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]
    return default_hooks.fp16_compress_hook if is_fp16 else default_hooks.allreduce_hook


def _slowed(hook: Hook) -> Hook:
    """Wrap a hook, so that a simulated slow rank sleeps before it sends each bucket, and its wait for the
    last bucket does not count as work."""

    def send(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        straggler.catch_up()
        sent = hook(state, bucket)
        # DDP waits for all buckets once the last one is sent.
        if bucket.is_last():
            straggler.exclude_time_until_done(sent)
        return sent

    return send


def average(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks, as DDP's reducer in C++ does, but with a collective that is begun in
    Python and so can be held back."""
    # The factor in double precision, as DDP without a hook has it: the numbers stay the same to the last bit.
    buffer = bucket.buffer().mul_(1 / group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda sent: sent.value()[0])
    return averaged
