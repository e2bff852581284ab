"""What is spread over the ranks comes back from a folder: models under FSDP, their optimizers and DTensors,
on as many ranks and on another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launching
import pytest

import nbgpu

MADE = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
rows = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
columns = distribute_tensor(torch.arange(12.0).reshape(2, 6), mesh, [Shard(1)])
everywhere = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("count", torch.zeros(()))
    def forward(self, x):
        self.count += 1
        return x + self.norm(self.first(x)).relu()

torch.manual_seed(0)
net = nn.Sequential(Block(5), Block(5), nn.Linear(5, 5), nn.Linear(5, 3, bias=False))
net[3].weight.requires_grad_(False)
for block in net[:2]:
    fully_shard(block, mesh=mesh, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
torch.manual_seed(rank)
x = torch.randn(4, 5)

def train(steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss)

train()
with torch.no_grad():
    net(x)  # which leaves the root's whole parameters in place
parallel = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
of_parallel = parallel.state_dict()
one_by_two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("all", "each"))
hybrid = fully_shard(nn.Linear(3, 3), mesh=one_by_two)
tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
tied[2].weight = tied[0].weight
fully_shard(tied)
of_fsdp1 = FSDP(nn.Linear(4, 8), device_id=torch.device("cpu"))
its_optimizer = torch.optim.SGD(of_fsdp1.parameters(), lr=0.1)
"""
SHOWN = """
def digest(tensor):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return [list(whole.shape), whole.reshape(-1).tolist()]

for value in (rows, columns, everywhere, *of_parallel.values(), *net.state_dict().values()):
    print(digest(value))
for parameter in net.parameters():
    state = optimizer.state.get(parameter, {})
    print(parameter.requires_grad, {name: digest(part) for name, part in state.items()})
print([group["params"][0] is net[0].first.weight for group in optimizer.param_groups], rows.device_mesh is mesh)
print(tied[0].weight is tied[2].weight, tied(torch.ones(1, 4)).sum().item())
print(type(net).__name__, type(net[0]).__name__, schedule.get_last_lr())
"""
GOES_ON = "print(train(), train(1), [digest(p) for p in net.parameters()])"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, str]:
    """(a folder, what two ranks held, how they went on, what the save has printed)."""
    folder = tmp_path_factory.mktemp("shards") / "held"
    with nbgpu.Cluster(**launching.settings()) as cluster:
        cluster.execute(MADE)
        report = str(cluster.save(folder))
        held = cluster.execute(SHOWN)
        goes_on = cluster.execute(GOES_ON)
    return folder, held, goes_on, report


def test_what_cannot_be_saved_is_named_with_its_line(saved: Any) -> None:
    *_, report = saved
    refused = report.partition("not saved:\n")[2].splitlines()
    assert [line.partition(": ")[0].strip() for line in refused] == [
        "parallel",
        "of_fsdp1",
        "its_optimizer.param_groups[0]['params'][0]",
    ]
    assert "it has hooks of parallelize_module" in refused[0]
    assert "Save a variable with its state_dict()" in refused[0]
    assert "Made by: parallel = parallelize_module(" in refused[0]
    assert "it is of FSDP1. Save a variable with a full state_dict()" in refused[1]
    assert "Made by: its_optimizer = torch.optim.SGD(" in refused[2]
    assert "not the same on all ranks: x\n" in report, "parts of one tensor are no values of their own"


def test_training_goes_on_to_the_same_bits(saved: Any) -> None:
    folder, held, goes_on, _ = saved
    with nbgpu.Cluster(**launching.settings()) as cluster:
        loaded = cluster.load(folder, trust=True)
        assert not loaded.left_out
        assert cluster.execute(SHOWN) == held
        assert cluster.execute(GOES_ON) == goes_on
        hybrid = cluster.execute(
            "print(hybrid.weight.device_mesh is one_by_two, hybrid(torch.ones(1, 3)).shape)"
        )
        assert hybrid == dict.fromkeys(range(2), "True torch.Size([1, 3])\n")
        # What was loaded can be saved and loaded like what was made.
        assert "not saved" not in str(cluster.save(folder.with_name("again")))


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_has_the_same_tensors_in_other_parts(saved: Any, ranks: int) -> None:
    folder, held, *_ = saved
    with nbgpu.Cluster(**launching.settings(ranks)) as cluster:
        loaded = cluster.load(folder, trust=True)
        assert {line.partition(":")[0] for line in loaded.left_out} == {"hybrid", "one_by_two", "x"}
        assert f"one_by_two: its mesh is 1 x 2, for 2 ranks and not for {ranks}" in str(loaded)
        assert set(cluster.execute(SHOWN).values()) == set(held.values())
        parts = cluster.execute("print(rows.to_local().shape[0], columns.to_local().shape[1])")
        assert parts == ({0: "5 6\n"} if ranks == 1 else {0: "2 2\n", 1: "2 2\n", 2: "1 2\n"})
        cluster.execute("x = torch.ones(4, 5) * rank; train()")
        assert len(set(cluster.execute("print([digest(p) for p in net.parameters()])").values())) == 1


def test_a_damaged_part_of_another_rank_is_found(saved: Any) -> None:
    folder, *_ = saved
    (data,) = folder.glob("data-*")
    path = data / "rank-1" / "tensors.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with nbgpu.Cluster(**launching.settings(1)) as cluster:
            with pytest.raises(nbgpu.RankError, match=r"rank-1/tensors\.safetensors is damaged"):
                cluster.load(folder, ["rows"])
            assert cluster.execute("print('rows' in globals())") == {0: "False\n"}
    finally:
        path.write_bytes(whole)
