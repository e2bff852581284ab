"""A rank fails while the others wait in a collective of a group, a mesh or a sharded model that the person
made."""

from __future__ import annotations

from collections.abc import Iterator

import faults
import launching
import pytest
from kernel import Kernel, kernel
from rows import Measured, row

BOUND_S = 20
PROMISE = "all are back, the sum is right, variables are kept; what cannot be moved is named, with its line"

MAKE = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
own = dist.new_group(list(range(world_size)))
mesh = init_device_mesh('cpu', (1, world_size), mesh_dim_names=('replicate', 'shard'))
part = mesh['shard']
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
for layer in model: fully_shard(layer, mesh=part)
fully_shard(model, mesh=part)
optimizer = torch.optim.AdamW(model.parameters())
table = distribute_tensor(torch.arange(12.0).reshape(6, 2), part, [Shard(0)])
kept = [p.to_local().clone() for p in model.parameters()] + [table.to_local().clone()]
"""
KEPT = """
model.reshard()
for layer in model: layer.reshard()
now = [p.to_local() for p in model.parameters()] + [table.to_local()]
all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
"""
STEP = "model(torch.randn(4, 8)).sum().backward()"

WAITS = {
    "new_group": "dist.all_reduce(torch.ones(10), group=own)",
    "a DeviceMesh": "dist.all_reduce(torch.ones(10), group=mesh.get_group('shard'))",
    "a DTensor": "table.full_tensor()",
    "the forward pass of fully_shard": "model(torch.randn(4, 8))",
}

MAKE_DDP = "net = torch.nn.Linear(256, 256)\nddp = torch.nn.parallel.DistributedDataParallel(net)"
GO_ON = "for _ in range(10**6): dist.all_reduce(torch.ones(100))"
STEPS = "for step in range(10**6):\n    ddp(torch.randn(4, 256)).sum().backward()"

WHEN = {
    "before a collective": f"{{fault}}\n{GO_ON}",
    "inside a collective": f"dist.all_reduce(torch.ones(100))\n{{fault_in_collective}}\n{GO_ON}",
    "after a collective": f"dist.all_reduce(torch.ones(100))\n{{fault}}\n{GO_ON}",
    "inside DDP's backward": f"{MAKE_DDP}\ndef hook(grad):\n    {{fault}}\n    return grad\n"
    f"net.weight.register_hook(hook)\n{STEPS}",
}


@pytest.fixture(scope="module", params=[2, 3])
def notebook(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with kernel() as started:
        started.run("%load_ext nbgpu")
        assert started.run(f"%nbgpu start {launching.flags(request.param)}").status == "ok"
        yield started
        started.run("%nbgpu stop")


def ranks_say(notebook: Kernel, code: str) -> list[str]:
    done = notebook.run(f"%%distributed\n{code}", timeout_s=BOUND_S)
    assert done.status == "ok", done.error
    return [line.split("] ", 1)[1] for line in done.stdout.splitlines()]


def num_ranks(notebook: Kernel) -> int:
    return len(ranks_say(notebook, "rank"))


def check_sum(notebook: Kernel) -> None:
    said = ranks_say(notebook, "total = torch.ones(1)\ndist.all_reduce(total)\nint(total) == world_size")
    assert set(said) == {"True"}


@pytest.mark.long
@row("one rank raises, the others wait in {waits}", PROMISE, bound_s=1)
@pytest.mark.parametrize("waits", WAITS)
def test_in_what_the_person_made(notebook: Kernel, measured: Measured, waits: str) -> None:
    assert notebook.run(f"%%distributed\n{MAKE}").status == "ok"
    done = notebook.run(f"%%distributed\n{faults.at(1, 'raise')}\n{WAITS[waits]}", timeout_s=BOUND_S)
    measured.ended(done.error)
    assert done.error.startswith("on rank 1:")
    assert done.error.count("on rank") == 1, "the freed ranks are no failures"
    size = num_ranks(notebook)
    for line in (
        f"own = dist.new_group({list(range(size))})",
        "mesh = dist.device_mesh.init_device_mesh("
        f"'cpu', {(1, size)}, mesh_dim_names=('replicate', 'shard'))",
        "part = mesh['shard']",
        "model = fully_shard(model, mesh=part)",
        "table = DTensor.from_local(table.to_local(), part, [Shard(dim=0)], shape=(6, 2), stride=(2, 1))",
        "optimizer = torch.optim.AdamW(...)",
    ):
        assert line in done.stderr
    check_sum(notebook)
    assert set(ranks_say(notebook, KEPT)) == {"True"}

    # The lines do what they say, and what has been made again is not named again.
    lines = [
        line.partition(": ")[2] for line in done.stderr.splitlines() if "= dist." in line or "mesh[" in line
    ]
    tensor = next(line for line in done.stderr.splitlines() if "from_local" in line).partition(": ")[2]
    again = "\n".join([*lines, tensor])
    assert set(ranks_say(notebook, f"{again}\ntable.full_tensor().sum().item()")) == {"66.0"}
    notebook.run("%%distributed\nmodel = optimizer = layer = None")
    done = notebook.run(f"%%distributed\n{faults.at(0, 'raise')}\ndist.barrier(own)", timeout_s=BOUND_S)
    assert "own = dist.new_group" in done.stderr
    assert "fully_shard" not in done.stderr


@row(
    "one rank raises {when}",
    "all are back; the cause is named; the sum is right; variables are kept",
    bound_s=1,
)
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("when", WHEN)
def test_before_inside_and_after(notebook: Kernel, measured: Measured, when: str, bad: int) -> None:
    ranks_say(notebook, "kept = torch.arange(4) * rank")
    code = WHEN[when].format(
        fault=faults.at(bad, "raise"), fault_in_collective=faults.at(bad, "raise_in_collective")
    )
    done = notebook.run(f"%%distributed\n{code}", timeout_s=BOUND_S)
    measured.ended(done.error)
    assert done.error.startswith(f"on rank {bad}:")
    assert done.error.count("on rank") == 1, "the freed ranks are no failures"
    check_sum(notebook)
    assert set(ranks_say(notebook, "torch.equal(kept, torch.arange(4) * rank)")) == {"True"}
