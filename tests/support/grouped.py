"""What a person hangs on a process group: how each thing is made, and how one sees that it works.

The code runs on every rank. A check is an expression that is true on each rank, and takes part in
collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

IMPORTS = """
import functools
from datetime import timedelta
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

class Keeper: pass

def sum_over(group):
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return int(total)

def mean_gradient(model):
    # The input of rank K is K + 1, so that the gradient of the weight is the mean of these numbers.
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    gradient = next(model.parameters()).grad
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)[0, 0].item()

def is_mean(model, numbers=None):
    numbers = range(world_size) if numbers is None else numbers
    return abs(mean_gradient(model) - 1 - sum(numbers) / len(numbers)) < 1e-2

def summed(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / world_size)

def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1, bias=False)
"""


@dataclass(frozen=True)
class Thing:
    """How a thing is made, and the check that it works."""

    make: str
    check: str


_ALL = "list(range(world_size))"
THINGS: dict[str, Thing] = {
    "a group": Thing("g1 = dist.new_group()", "sum_over(g1) == world_size"),
    "a group of some ranks": Thing(
        "g2 = [dist.new_group([0]), dist.new_group(list(range(1, world_size)))][min(rank, 1)]",
        "sum_over(g2) == (1 if rank == 0 else world_size - 1)",
    ),
    "a group with a timeout": Thing(
        "g3 = dist.new_group(timeout=timedelta(seconds=60))", "sum_over(g3) == world_size"
    ),
    "a group in a list": Thing("g4 = [dist.new_group()]", "sum_over(g4[0]) == world_size"),
    "a group in a tuple": Thing("g5 = (dist.new_group(), 1)", "sum_over(g5[0]) == world_size"),
    "a group in an attribute": Thing(
        "g6 = Keeper(); g6.group = dist.new_group()", "sum_over(g6.group) == world_size"
    ),
    "a group in a closure": Thing(
        "g7 = (lambda group: lambda: group)(dist.new_group())", "sum_over(g7()) == world_size"
    ),
    "the default group": Thing("g8 = dist.group.WORLD", "sum_over(g8) == world_size"),
    "a group without the default one": Thing(
        f"g9 = dist.new_group({_ALL}, use_local_synchronization=True)", "sum_over(g9) == world_size"
    ),
    "a mesh": Thing("m1 = init_device_mesh('cpu', (world_size,))", "sum_over(m1.get_group()) == world_size"),
    "a part of a mesh": Thing(
        "m2 = init_device_mesh('cpu', (1, world_size), mesh_dim_names=('a', 'b'))['b']",
        "sum_over(m2.get_group()) == world_size",
    ),
    "a DTensor": Thing(
        "t1 = distribute_tensor(torch.arange(12.0).reshape(6, 2), init_device_mesh('cpu', (world_size,)), [Shard(0)])",
        "t1.full_tensor().sum().item() == 66.0 and t1.redistribute(placements=[Replicate()]).to_local().sum().item() == 66.0",
    ),
    "a DTensor of two dimensions": Thing(
        "t2 = distribute_tensor(torch.ones(6, 2), init_device_mesh('cpu', (1, world_size)), [Replicate(), Shard(0)])",
        "(t2 + t2).full_tensor().sum().item() == 24.0",
    ),
    "a sharded model": Thing("s1 = fully_shard(linear())", "is_mean(s1)"),
    "a sharded model and its optimizer": Thing(
        "s2 = torch.nn.Sequential(linear()); fully_shard(s2[0]); fully_shard(s2)\n"
        "s2_optimizer = torch.optim.AdamW(s2.parameters()); s2(torch.ones(1, 2)).sum().backward(); s2_optimizer.step()",
        "is_mean(s2) and s2_optimizer.step() is None",
    ),
    "a sharded and replicated model": Thing(
        "s3 = fully_shard(linear(), mesh=init_device_mesh('cpu', (1, world_size), mesh_dim_names=('a', 'b')))",
        "is_mean(s3)",
    ),
    "DDP": Thing("d1 = DistributedDataParallel(linear())", "is_mean(d1)"),
    "DDP with a hook": Thing(
        "d2 = DistributedDataParallel(linear()); d2.register_comm_hook(None, summed)",
        "is_mean(d2) and len(d2._comm_hooks) == 1",
    ),
    "DDP with a hook on a group": Thing(
        "d3_group = dist.new_group(); d3 = DistributedDataParallel(linear())\n"
        "d3.register_comm_hook(d3_group, default_hooks.fp16_compress_hook)",
        "is_mean(d3) and len(d3._comm_hooks) == 1",
    ),
    "DDP with PowerSGD": Thing(
        "d4 = DistributedDataParallel(linear())\n"
        "d4.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)",
        "is_mean(d4)",
    ),
    "DDP on a group": Thing(
        "d5 = DistributedDataParallel(linear(), process_group=dist.new_group())", "is_mean(d5)"
    ),
    "DDP on a group of some ranks": Thing(
        "d6 = [dist.new_group([0]), dist.new_group(list(range(1, world_size)))][min(rank, 1)]\n"
        "d6 = DistributedDataParallel(linear(), process_group=d6)",
        "is_mean(d6, range(1, world_size) if rank else [0])",
    ),
    "DDP with unused parameters": Thing(
        "d7 = DistributedDataParallel(linear(), find_unused_parameters=True)", "is_mean(d7)"
    ),
    "DDP in an attribute": Thing(
        "d8 = Keeper(); d8.model = DistributedDataParallel(linear())", "is_mean(d8.model)"
    ),
    "a sharded optimizer": Thing(
        "z1_model = DistributedDataParallel(linear())\n"
        "z1 = ZeroRedundancyOptimizer(z1_model.parameters(), torch.optim.Adam, lr=0.0)",
        "is_mean(z1_model) and z1.step() is None",
    ),
    "a sharded optimizer on a group": Thing(
        "z2_model = DistributedDataParallel(linear())\n"
        "z2 = ZeroRedundancyOptimizer(z2_model.parameters(), torch.optim.Adam, process_group=dist.new_group(), lr=0.0)",
        "is_mean(z2_model) and z2.step() is None",
    ),
}
"""By name. No two things share a variable."""
