"""What the ranks hold comes back from a folder on new ranks, also on another number of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import launching
import pytest
import safetensors.torch
import torch
from kernel import kernel
from rows import moment

import nbgpu

DEFINITIONS = """
import functools
import numpy as np
from dataclasses import dataclass
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

@dataclass
class Point:
    x: float

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.act = nn.functional.softplus
    def forward(self, x):
        return scaled(self.act(self.body(x)))

class Wide(Net):
    at = [Point(1.0)]

def scaled(x, factor=3.0):
    return x * factor

@functools.cache
def squared(x):
    return x * x
"""
STATE = """
import datetime
import pandas as pd
from collections import OrderedDict, defaultdict
from pathlib import Path

torch.manual_seed(0)
net = Wide()
ddp = DDP(net, find_unused_parameters=True)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
recurrent = nn.LSTM(3, 5)
torch.manual_seed(rank)
x = torch.randn(16, 4)

def train(steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ddp(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss)

train()
own = torch.full((2,), float(rank))
base = torch.arange(10.0)
view, crossed = base[2:5], base.view(2, 5).t()
parameter = nn.Parameter(torch.ones(2))
parameter.grad = torch.full((2,), 3.0)
half, double, none = torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex128), torch.empty(0, 3)
array, fortran = np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3), "f4"))
dates, words, number = np.array(["2020-01-01"], "M8[D]"), np.array(["a", "bc"]), np.float32(1.5)
frame = pd.DataFrame({"a": [1, 2], "b": ["x", None], "c": [0.5, float("nan")]}, index=[5, 7])
series = pd.Series([1.0, 2.0], name="s")
nested = {"items": [1, (2, 3.5)], "set": {1, 2}, 5: None, "far": float("inf"), "z": 1 + 2j, "b": b"xyz", "x": x}
nested["itself"] = nested
grouped, ordered = defaultdict(list, a=[1]), OrderedDict(z=1, a=2)
point, when, sparse = Point(2.5), datetime.datetime(2020, 1, 1), torch.eye(3).to_sparse()
path, dtype, place = Path("runs"), torch.bfloat16, device
generator = torch.Generator().manual_seed(5)
pairs = torch.utils.data.TensorDataset(base, base)
loader = torch.utils.data.DataLoader(pairs, batch_size=4, shuffle=True, generator=generator)
if rank == 1:
    only_here = "b"
"""
SHOWN = """
print(train(), torch.rand(1).item(), np.random.rand(), __import__("random").random(), schedule.get_last_lr())
print(own, parameter.grad, half, double, none.shape, array, fortran.flags.f_contiguous, dates, words, number)
print(repr(number), frame.to_dict(), frame.dtypes.to_dict(), series, sorted(map(str, nested)), nested["items"])
print(nested["x"] is x, nested["itself"] is nested, ddp.module is net, ddp.find_unused_parameters)
print(optimizer.param_groups[0]["params"][0] is net.body[0].weight, view.data_ptr() - base.data_ptr(), crossed[1])
print(grouped["b"], ordered, point, when, sparse.to_dense(), path, dtype, place, squared(3), Wide.at, net.training)
print([batch[0].tolist() for batch in loader], recurrent(torch.ones(1, 1, 3))[0].sum().item())
print(globals().get("only_here"), isinstance(net, Net), scaled(2))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str], str]:
    """(a folder with what two ranks held, what they go on with by rank, what the save has printed)."""
    folder = tmp_path_factory.mktemp("variables") / "held"
    with nbgpu.Cluster(**launching.settings()) as cluster:
        cluster.execute(DEFINITIONS)
        cluster.execute(STATE)
        report = str(cluster.save(folder))
        goes_on = cluster.execute(SHOWN)
    return folder, goes_on, report


@pytest.fixture
def new_ranks(saved: Any) -> Iterator[nbgpu.Cluster]:
    """As many ranks as have saved."""
    with nbgpu.Cluster(**launching.settings()) as cluster:
        yield cluster


def test_all_goes_on_as_it_would_have(new_ranks: nbgpu.Cluster, saved: Any) -> None:
    folder, goes_on, report = saved
    assert "not saved" not in report
    each_own = re.search("not the same on all ranks: (.*)", report)
    # BatchNorm's statistics differ between the ranks, and DDP takes those of rank 0.
    assert each_own is not None
    assert each_own[1].split(", ") == ["nested", "only_here", "own", "x"]
    loaded = new_ranks.load(folder, trust=True)
    assert not loaded.left_out
    assert not loaded.untrusted
    assert new_ranks.execute(SHOWN) == goes_on


def test_without_trust_nothing_of_the_folder_runs(new_ranks: nbgpu.Cluster, saved: Any) -> None:
    folder, *_ = saved
    loaded = new_ranks.load(folder)
    assert {"own", "frame", "recurrent", "loader", "optimizer", "array"} <= {*loaded.names}
    assert {"net", "ddp", "Net", "scaled", "point", "when", "sparse", "train"} <= {*loaded.untrusted}
    assert loaded.untrusted["when"] == "a pickle"
    assert "the definition of Wide" in loaded.untrusted["ddp"]
    assert f"%nbgpu load {folder} --trust" in str(loaded)
    # Classes that the person has defined are the person's own code, and take the values.
    new_ranks.execute(DEFINITIONS)
    loaded = new_ranks.load(folder, ["net", "point", "optimizer"])
    assert loaded.names == ["net", "optimizer", "point"]
    assert new_ranks.execute(
        "print(point, optimizer.param_groups[0]['params'][0] is net.body[0].weight)"
    ) == dict.fromkeys(range(2), "Point(x=2.5) True\n")


def test_names_can_be_chosen_and_random_numbers_stay(new_ranks: nbgpu.Cluster, saved: Any) -> None:
    folder, *_ = saved
    new_ranks.execute("own = 1; torch.manual_seed(3); state = torch.get_rng_state()")
    assert new_ranks.load(folder, ["own"]).names == ["own"]
    assert new_ranks.execute(
        "print(own.tolist(), 'x' in globals(), torch.equal(state, torch.get_rng_state()))"
    ) == {
        0: "[0.0, 0.0] False True\n",
        1: "[1.0, 1.0] False True\n",
    }
    with pytest.raises(nbgpu.DataError, match=r"has no variable nobody. It has: DDP, "):
        new_ranks.load(folder, ["own", "nobody"])


def test_on_another_number_of_ranks_what_was_equal_comes_back(saved: Any) -> None:
    folder, *_ = saved
    with nbgpu.Cluster(**launching.settings(3)) as cluster:
        loaded = cluster.load(folder, trust=True)
        assert {line.partition(":")[0] for line in loaded.left_out} == {"nested", "only_here", "own", "x"}
        assert "own: not the same on the 2 ranks that there were, and there are 3 now" in str(loaded)
        assert not loaded.with_random_state
        cluster.execute("x = torch.ones(4, 4) * rank")
        losses = set(cluster.execute("print(train())").values())
        assert len(losses) == 3, "each rank has a batch of its own"
        weights = set(
            cluster.execute(
                "print(float(net.body[0].weight.sum()), optimizer.state[net.body[0].weight]['step'])"
            ).values()
        )
        assert len(weights) == 1, "the gradients were averaged"


def test_tensors_are_where_other_tools_find_them(saved: Any) -> None:
    folder, *_ = saved
    (data,) = folder.glob("data-*")
    stored = safetensors.torch.load_file(data / "rank-1" / "tensors.safetensors")
    assert torch.equal(stored["own"], torch.ones(2))
    assert stored["net.body.0.weight"].shape == (8, 4)
    assert stored["half"].dtype == torch.bfloat16
    assert stored["base"].dtype == torch.uint8, "three tensors share its bytes"
    assert json.loads((folder / "manifest.json").read_text())["format"] == 1


def test_the_magics_say_what_they_did(tmp_path: Path) -> None:
    with kernel() as notebook:
        assert notebook.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        assert notebook.run("%%distributed\na, b = 1, rank\nclass C: pass\nc = C()").status == "ok"
        folder = tmp_path / "with a space"
        done = notebook.run(f"%nbgpu save '{folder}'")
        assert done.stdout.startswith("saved 4 variables of 2 ranks in "), done
        assert "not the same on all ranks: b" in done.stdout
        assert notebook.run("%nbgpu restart").status == "ok"
        done = notebook.run(f"%nbgpu load '{folder}'")
        assert "loaded 2 variables on 2 ranks from" in done.stdout
        assert (
            "not loaded, because code of the folder would have to run for them (the definition of C): C, c"
            in done.stdout
        )
        assert notebook.run("%%distributed\nprint(a, b)").said(0, 1) == [["1 0"], ["1 1"]]
        done = notebook.run(f"%nbgpu load --trust '{folder}' c")
        assert "loaded 1 variable on 2 ranks" in done.stdout
        assert notebook.run("%%distributed\nprint(type(c).__name__)").said(0) == [["C"]]
        # A rank that takes another's place has nothing of what was loaded, and that is said.
        done = notebook.run("%nbgpu restart --rank 1 --replay")
        assert f"values that were loaded are missing there: %nbgpu load '{folder}'" in done.stdout
        help_text = notebook.run("%nbgpu help").stdout
        assert "%nbgpu save FOLDER" in help_text
        assert notebook.run("%nbgpu stop").status == "ok"


def test_a_kernel_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    """Run in a process of its own, because a process has one cluster at a time."""
    folder = tmp_path / "held"
    moment().unlink(missing_ok=True)
    program = tmp_path / "program.py"
    program.write_text(
        "import nbgpu, sys\n"
        "with nbgpu.Cluster(gpus='none', ranks=2) as cluster:\n"
        "    cluster.execute('first = rank')\n"
        f"    cluster.save({str(folder)!r})\n"
        f"    cluster.execute({faults.when_pickled(1, 'sleep')!r})\n"
        f"    cluster.save({str(folder)!r})\n"
    )
    with subprocess.Popen([sys.executable, str(program)]) as process:
        try:
            give_up_s = time.monotonic() + 300
            while not moment().exists():
                assert time.monotonic() < give_up_s, "the second save did not begin"
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.kill()
    process.wait()
    with nbgpu.Cluster(**launching.settings()) as cluster:
        assert cluster.load(folder).names == ["first"]
        assert cluster.execute("print(first)") == {0: "0\n", 1: "1\n"}
        # What the killed save had written is removed by the next one.
        cluster.save(folder)
    assert len(list(folder.glob("data-*"))) == 1
