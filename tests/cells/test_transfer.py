"""Values between the notebook and the ranks; tests/unit/serialization/test_parcels.py tries what kinds there
are."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nbgpu

NUM = 10**6


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where this process's own cells would be."""
    return sys.modules["__main__"]


def test_large_values_come_from_every_rank_and_from_one(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute(f"x = torch.full(({NUM},), float(rank)); y = {{'x': x, 'n': x.numpy()[:5]}}")
    by_rank = cluster2.pull("x", ranks="all")
    assert {rank: float(x.mean()) for rank, x in by_rank.items()} == {0: 0.0, 1: 1.0}
    both = cluster2.pull(["x", "y"], rank=1)
    assert both["x"] is both["y"]["x"]
    both["x"].fill_(5)
    assert cluster2.execute("print(int(x.sum()))") == {0: "0\n", 1: f"{NUM}\n"}
    assert cluster2.pull("x", ranks=[1])[1][0] == 1


def test_a_pushed_value_is_each_ranks_own(cluster2: nbgpu.Cluster) -> None:
    x = torch.ones(NUM)
    cluster2.push(x=x)
    cluster2.execute("x += rank")
    assert cluster2.execute("print(int(x.sum()))") == {0: f"{NUM}\n", 1: f"{2 * NUM}\n"}
    assert float(x.sum()) == NUM
    cluster2.push([1], x=2)
    assert cluster2.execute("print(type(x).__name__)") == {0: "Tensor\n", 1: "int\n"}


def test_where_memory_cannot_be_shared_the_bytes_go_in_the_message(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute(
        "from nbgpu.serialization import shared_memory; shared_memory._boot = lambda: 'another host'"
    )
    try:
        cluster2.push(x=torch.arange(NUM))
        cluster2.execute("x += rank")
        by_rank = cluster2.pull("x", ranks="all")
    finally:
        cluster2.execute("from functools import cache; from pathlib import Path")
        cluster2.execute("shared_memory._boot = lambda: Path('/proc/sys/kernel/random/boot_id').read_text()")
    assert {rank: (int(x[0]), int(x[-1])) for rank, x in by_rank.items()} == {0: (0, NUM - 1), 1: (1, NUM)}
    by_rank[0].fill_(0)


def test_all_bad_names_and_values_of_a_pull_are_told_at_once(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute("losses = [1]; numbers = (n for n in losses); held = {'file': open('/dev/null')}")
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.pull(["loses", "losses", "numbers", "held", "nothing_like_it"])
    cluster2.execute("held['file'].close()")
    assert caught.value.failures[0].message.splitlines() == [
        "loses: there is no variable of this name. Did you mean losses?",
        "nothing_like_it: there is no variable of this name",
        "numbers: generator cannot travel: it is in mid-run. Send what it yields: list(...)",
        "held['file']: _io.TextIOWrapper cannot travel: it is open in its own process only. Send its path, or what is in it",
    ]


def test_what_belongs_to_the_group_stays_and_says_so(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "both = [model]\n"
        "group = dist.new_group()\nmesh = init_device_mesh('cpu', (2,))\n"
        "parts = {'x': distribute_tensor(torch.ones(4), mesh, [Shard(0)])}\n"
        "state = model.module.state_dict()"
    )
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.pull(["both", "group", "mesh", "parts"])
    model, group, mesh, parts = caught.value.failures[0].message.splitlines()
    assert model.startswith("both[0]: torch.nn.parallel.distributed.DistributedDataParallel cannot travel")
    assert model.endswith("Send both[0].module.state_dict()")
    assert "belongs to the process group" in group
    assert mesh.startswith("mesh: torch.distributed.device_mesh.DeviceMesh")
    assert parts.startswith("parts['x']: torch.distributed.tensor.DTensor")
    assert "full_tensor()" in parts
    assert list(cluster2.pull("state")) == ["weight", "bias"]
    assert list(cluster2.pull("model.module.state_dict()")) == ["weight", "bias"]
    with pytest.raises(nbgpu.RankError, match=r"model\.modules\['x'\]: TypeError: 'method' object"):
        cluster2.pull("model.modules['x']")
    cluster2.execute("del model, group, mesh, parts")


def test_nothing_is_sent_where_one_value_of_a_push_is_bad(cluster2: nbgpu.Cluster) -> None:
    with pytest.raises(nbgpu.TransferError, match=r"^bad\[0\]: generator"):
        cluster2.push(good=torch.ones(3), bad=[(n for n in ())])
    assert cluster2.execute("print('good' in globals())") == {0: "False\n", 1: "False\n"}


def test_a_class_of_a_cell_must_be_on_both_sides(cluster2: nbgpu.Cluster, here: Any) -> None:
    definition = "class OnlyThere:\n    pass"
    cluster2.execute(f"{definition}\nvalue = {{'a': [OnlyThere()]}}; value['a'][0].x = 3")
    with pytest.raises(
        nbgpu.TransferError, match=r"^value\['a'\]\[0\]: OnlyThere is defined in a cell there"
    ):
        cluster2.pull("value")
    exec(definition, vars(here))
    try:
        come = cluster2.pull("value")["a"][0]
        assert (type(come), come.x) == (here.OnlyThere, 3)
        cluster2.push(back=come)
        assert cluster2.execute("print(type(back) is OnlyThere, back.x)")[0] == "True 3\n"
        cluster2.execute("del OnlyThere")
        with pytest.raises(
            nbgpu.RankError, match=r"back: OnlyThere is defined in a cell there .* with %push"
        ):
            cluster2.push(back=come)
    finally:
        del here.OnlyThere


def test_functions_still_travel_by_themselves(cluster2: nbgpu.Cluster, here: Any) -> None:
    exec("def double(x):\n    return 2 * x", vars(here))
    try:
        cluster2.push(double=here.double)
    finally:
        del here.double
    assert cluster2.execute("print(double(4))") == {0: "8\n", 1: "8\n"}
    assert cluster2.pull("double")(5) == 10


def test_more_variables_than_a_process_may_have_files_open(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute("many = [torch.full((40_000,), float(n)) for n in range(2_000)]")
    many = cluster2.pull("many")
    assert float(many[1999][0]) == 1999
    assert len(list(Path(f"/proc/{os.getpid()}/fd").iterdir())) < 500
