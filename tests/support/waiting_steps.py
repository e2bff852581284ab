"""Training steps whose layers wait, as a CPU does while its GPU computes, on a group of any kind."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from slow_link import Place
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

NUM_LAYERS = 8
_NUM_WARM_UPS = 3


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, wait_s: float) -> Tensor:
        context.wait_s = wait_s
        time.sleep(wait_s)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * context.wait_s)
        return gradients[0], None


class _Layer(nn.Module):
    def __init__(self, width: int, wait_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.wait_s = wait_s

    def forward(self, tensor: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(self.linear(tensor), self.wait_s)  # type: ignore[no-untyped-call]
        return waited


def steps_s(width: int, wait_s: float, bucket_mb: float, num_steps: int) -> list[float]:
    """Return the time of each step of DDP.

    Args:
        width: of each of the layers, whose weights are width x width x 4 bytes.
        wait_s: how long a layer waits in the forward pass; twice as long in the backward pass.
        bucket_mb: the size of DDP's buckets.
        num_steps: the number of timed steps.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        nn.Sequential(*[_Layer(width, wait_s) for _ in range(NUM_LAYERS)]), bucket_cap_mb=bucket_mb
    )
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    found = []
    for _ in range(_NUM_WARM_UPS + num_steps):
        dist.barrier()
        begun_s = time.perf_counter()
        ddp(torch.ones(1, width)).mean().backward()
        ddp.zero_grad(set_to_none=False)
        found.append(time.perf_counter() - begun_s)
    return found[_NUM_WARM_UPS:]


def steps_over(place: Place, rows: list[list[Any]]) -> list[list[float]]:
    """Return the times of the steps of several settings over a real link, for `SlowLink.run`."""
    store = dist.FileStore(str(place.rendezvous / "store"), place.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=120)
    )
    try:
        return [steps_s(*row) for row in rows]
    finally:
        dist.destroy_process_group()
