"""Communication hooks of DDP: buckets of gradients travel unchanged, in 16 bits, or compressed by PowerSGD.

DDP always gets a hook in Python, although torch needs none for buckets that travel unchanged. A Python hook
calls the collectives of `torch.distributed`, so that their times can be recorded and a slower link can be
simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from nbgpu.config import TrainConfig
from nbgpu.engine.group import simulated_ddp

_SEED_OF_DIRECTIONS = 0
Sent = torch.futures.Future[Tensor]
BucketHook = Callable[[None, Any], Sent]
"""A communication hook of DDP, which is called with each `GradBucket` that is ready; the future holds the
average over the ranks."""


def of(config: TrainConfig, num_warmup_steps: int) -> BucketHook:
    """Return the hook that the settings choose.

    Args:
        config: the settings, with `comm_hook`.
        num_warmup_steps: the steps in which PowerSGD sends gradients whole.
    """
    group = dist.group.WORLD
    assert group is not None, "DDP has a process group"
    # Lambdas, because torch refuses a hook whose annotations are strings, as those of this module are.
    match config.comm_hook:
        case "none":
            return lambda _, bucket: simulated_ddp.average(group, bucket)
        case "bf16":
            return lambda _, bucket: default_hooks.bf16_compress_hook(group, bucket)
        case "fp16":
            return lambda _, bucket: default_hooks.fp16_compress_hook(group, bucket)
        case "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=config.powersgd_rank,
                # Until then gradients are sent whole, at least while DDP rebuilds its buckets.
                start_powerSGD_iter=max(10, num_warmup_steps),
                random_seed=config.seed,
            )
            first: dict[int, Tensor] = {}
            return lambda _, bucket: _compressed(state, first, bucket)


def _compressed(state: Any, first: dict[int, Tensor], bucket: Any) -> Sent:
    """Send a bucket of gradients by PowerSGD: two low-rank matrices (Vogels et al. 2019) in place of the
    gradients.

    Args:
        state: PowerSGD's.
        first: the initial matrix of each bucket, by its index; filled here.
        bucket: a GradBucket.
    """
    _forget_nonfinite(state, first, bucket.index())
    sent: Sent = powerSGD_hook.powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        # PowerSGD begins its second exchange when the first has ended, over gloo on another thread. Meanwhile
        # the backward pass would begin the exchange of the next bucket. Ranks that start the two in different
        # orders would wait for each other for ever.
        sent.wait()
    return sent


def _forget_nonfinite(state: Any, first: dict[int, Tensor], index: int) -> None:
    """Reset PowerSGD's memory of a bucket if its last gradients were NaN or infinite, in a step that was left
    out.

    The error of the compression is added to the next gradients, and the low-rank matrix of one step is where
    the next one begins, so that both would stay NaN for ever. The decision is made on the device, so that the
    host does not wait.
    """
    if (error := state.error_dict.get(index)) is not None:
        error.copy_(torch.where(torch.isfinite(error).all(), error, 0.0))
    if (directions := state.q_memory_dict.get(index)) is not None:
        if index not in first or first[index].shape != directions.shape:
            # Drawn from one seed on all ranks, because PowerSGD needs the same matrix on each.
            drawing = torch.Generator().manual_seed(_SEED_OF_DIRECTIONS)
            drawn = torch.randn(directions.shape, generator=drawing, dtype=torch.float32, device="cpu")
            first[index] = drawn.to(directions)
        directions.copy_(torch.where(torch.isfinite(directions).all(), directions, first[index]))
