"""A rank fails while the others wait in a collective of a group, a mesh or a sharded model that the person
made."""

from __future__ import annotations

from collections.abc import Iterator

import faults
import launching
import leaks
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

USE = f"""
for _ in range(2): optimizer.zero_grad(); {STEP}; optimizer.step()
total = torch.ones(1)
dist.all_reduce(total, group=own)
moved = torch.ones(1)
dist.all_reduce(moved, group=mesh.get_group('shard'))
(int(total), total.item() == moved.item(), table.full_tensor().sum().item(), len(optimizer.state) == 4)
"""

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
    # A rank that takes the place of a dead one is no leak.
    with kernel() as started, leaks.holding_family_of(started.manager.provisioner.pid):
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
    assert "make it again" not in done.stderr
    check_sum(notebook)
    assert set(ranks_say(notebook, KEPT)) == {"True"}
    assert set(ranks_say(notebook, USE)) == {str((num_ranks(notebook), True, 66.0, True))}


def test_what_keeps_a_group_has_the_new_one(notebook: Kernel) -> None:
    make = """
class Keeper: pass
own = dist.new_group()
keeper, listed, paired = Keeper(), [own], (own, 1)
keeper.group = own
def of_closure(group): return lambda: group
closure = of_closure(own)
def default(group=own): return group
"""
    assert notebook.run(f"%%distributed\n{make}").status == "ok"
    for bad in (0, 1):
        notebook.run(f"%%distributed\n{faults.at(bad, 'raise')}\ndist.barrier(own)", timeout_s=BOUND_S)
    use = """
kept = [own, keeper.group, listed[0], paired[0], closure(), default()]
ones = torch.ones(len(kept))
for group, one in zip(kept, ones.split(1), strict=True): dist.all_reduce(one, group=group)
set(ones.tolist()) == {world_size}"""
    assert set(ranks_say(notebook, use)) == {"True"}


def test_ddp_on_groups_of_ones_own_goes_on_in_each(notebook: Kernel) -> None:
    size = num_ranks(notebook)
    make = """
halves = [dist.new_group([0]), dist.new_group(list(range(1, world_size)))]
half = halves[min(rank, 1)]
torch.manual_seed(min(rank, 1))
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=half)
kept = ddp.module.weight.item()
"""
    assert notebook.run(f"%%distributed\n{make}").status == "ok"
    done = notebook.run(f"%%distributed\n{faults.at(0, 'raise')}\ndist.barrier()", timeout_s=BOUND_S)
    assert done.stderr.splitlines()[1:] == []
    gradient = "ddp(torch.full((1, 1), float(rank))).sum().backward(); ddp.module.weight.grad.item()"
    said = ranks_say(notebook, f"{gradient}, kept == ddp.module.weight.item()")
    mean = sum(range(1, size)) / (size - 1)
    assert said == ["(0.0, True)", *[f"({mean}, True)"] * (size > 1)], said


def test_shards_of_two_steps_are_named_once(notebook: Kernel) -> None:
    make = f"{MAKE}\n{STEP}"
    assert notebook.run(f"%%distributed\n{make}").status == "ok"
    uneven = "if rank == 1: optimizer.step(); raise ValueError('on purpose')\ndist.barrier()"
    done = notebook.run(f"%%distributed\n{uneven}", timeout_s=BOUND_S)
    assert "the parts of model are not of one step on all ranks: load the last checkpoint" in done.stderr
    done = notebook.run(f"%%distributed\n{faults.at(0, 'raise')}\ndist.barrier()", timeout_s=BOUND_S)
    assert "the parts of" not in done.stderr


@pytest.mark.long
def test_what_a_dead_rank_had_is_named_then_and_where_it_is_used(notebook: Kernel) -> None:
    others = "others = dist.new_group(list(range(world_size - 1)))"
    assert notebook.run(f"%%distributed\n{MAKE}\n{others}\nown").status == "ok"
    kill = "import os\nif rank == world_size - 1: os.kill(os.getpid(), 9)\ndist.barrier()"
    done = notebook.run(f"%%distributed\n{kill}", timeout_s=2 * BOUND_S)
    for line in (
        "make it again: own = dist.new_group",
        "make it again: part = mesh['shard']",
        "make it again: model = fully_shard(model, mesh=part)",
        "make it again: table = DTensor.from_local(table.to_local(), part, [Shard(dim=0)], shape=(6, 2)",
        "make it again: optimizer = torch.optim.AdamW(...)",
    ):
        assert done.stderr.count(line) == 1
    assert "others = " not in done.stderr
    assert "make it again: _" not in done.stderr
    sentence = "RuntimeError: this belonged to a process group that has ended; make it again"
    lived = "if rank < world_size - 1:\n    "
    for use, line in (
        ("dist.barrier(own)", "own = dist.new_group"),
        ("model(torch.randn(4, 8))", "model = fully_shard(model, mesh=part)"),
        ("table.full_tensor()", "table = DTensor.from_local"),
    ):
        done = notebook.run(f"%%distributed\n{lived}{use}", timeout_s=BOUND_S)
        assert f"{sentence}: {line}" in done.error
        assert "Process group <" not in done.error
        assert "make it again" not in done.stderr
    use = f"total = torch.ones(1)\n{lived}dist.all_reduce(total, group=others)\nint(total)"
    assert set(ranks_say(notebook, use)) == {"1", str(num_ranks(notebook) - 1)}


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
