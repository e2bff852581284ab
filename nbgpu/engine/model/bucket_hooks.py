"""How DDP's buckets of gradients travel: as they are, in 16 bits, or compressed by PowerSGD.

DDP always gets a hook in Python, although torch has one of its own for buckets that travel as they are. The
collectives of a Python hook are those of `torch.distributed`, so that their times can be noted and a slower
link can be simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from nbgpu.config import TrainConfig

Sent = torch.futures.Future[Tensor]
BucketHook = Callable[[None, Any], Sent]
"""What DDP calls with each `GradBucket` that is ready; the future holds the average over the ranks."""


def of(config: TrainConfig) -> BucketHook:
    """Return the hook that the settings choose."""
    group = dist.group.WORLD
    assert group is not None, "DDP has a process group"
    # Lambdas, because torch refuses a hook whose annotations are strings, as those of this module are.
    match config.comm_hook:
        case "none":
            return lambda _, bucket: _average(bucket)
        case "bf16":
            return lambda _, bucket: default_hooks.bf16_compress_hook(group, bucket)
        case "fp16":
            return lambda _, bucket: default_hooks.fp16_compress_hook(group, bucket)
        case "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=config.powersgd_rank,
                # Until then gradients are sent whole, while DDP rebuilds its buckets.
                start_powerSGD_iter=max(10, config.num_warmup_steps(config.steps)),
                random_seed=config.seed,
            )
            return lambda _, bucket: _compressed(state, bucket)


def _compressed(state: Any, bucket: Any) -> Sent:
    """Send the main directions of a bucket's gradients."""
    sent: Sent = powerSGD_hook.powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        # PowerSGD begins its second exchange when the first one has ended, which over gloo happens on another
        # thread. Beside it the backward pass would begin that of the next bucket, and ranks that disagree on
        # which came first wait for each other for ever.
        sent.wait()
    return sent


def _average(bucket: Any) -> Sent:
    # The factor in double precision, as DDP without a hook has it: the numbers stay the same to the last bit.
    buffer = bucket.buffer().mul_(1 / dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    averaged: Sent = work.get_future().then(lambda sent: sent.value()[0])
    return averaged
