"""`%nbgpu vars`: the ranks' variables side by side, in a real kernel and from Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

import launching
import pytest
from kernel import Done, Kernel, kernel

CELL = """%%distributed
import numpy as np
import pandas as pd
from torch.nn.parallel import DistributedDataParallel

same = torch.ones(2, 3)
large = torch.zeros(300, 400).t()
large_that_differs = torch.full((300, 400), float(rank))
shape_differs = torch.zeros(rank + 1)
dtype_differs = torch.zeros(2, dtype=[torch.float32, torch.bfloat16][rank])
type_differs = [1, "one"][rank]
lr = 0.1 * (rank + 1)
if rank == 1:
    second_only = "b"
array = np.arange(3)
array_differs = np.arange(3) + rank
frame = pd.DataFrame({"a": [1, 2], "b": [3, 4]})
items = list(range(3))
items_differ = list(range(3 + rank))
torch.manual_seed(0)
model = torch.nn.Linear(30, 40)
model_differs = torch.nn.Linear(30, 40)
torch.nn.init.constant_(model_differs.bias, rank)
ddp = DistributedDataParallel(torch.nn.Linear(3, 4))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.5)
lazy = torch.nn.LazyLinear(3)
sparse = torch.eye(3).to_sparse()
nan = float("nan")

def function(x):
    return [x + 1 for _ in range(2)]

if rank == 0:
    class Differs:
        def method(self): return 1
else:
    class Differs:
        def method(self): return 2

class Broken:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __getattr__(self, name):
        raise RuntimeError("no attributes")

    @property
    def __class__(self):
        raise RuntimeError("no class")

class BrokenList(list):
    def __len__(self):
        raise RuntimeError("no length")

broken, broken_list = Broken(), BrokenList()
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        assert started.run(CELL).status == "ok"
        yield started
        started.run("%nbgpu stop")


def rows(done: Done) -> dict[str, list[list[str]]]:
    """The cells of the table's rows by name, from the HTML, where no cell is empty by alignment."""
    assert done.status == "ok", done.error
    (display,) = done.displays
    found: dict[str, list[list[str]]] = {}
    headings = re.findall(r"<th style[^>]*>(.*?)</th>", display["text/html"])
    assert headings[0] == "name"
    for line in re.findall(r"<tr>(<td.*?)</tr>", display["text/html"]):
        name, *cells = re.findall(r"<td[^>]*>(.*?)</td>", line)
        found.setdefault(name, []).append(cells)
    return found


def test_the_table_says_what_each_rank_has_and_marks_what_differs(notebook: Kernel) -> None:
    table = rows(notebook.run("%nbgpu vars"))
    assert table["same"] == [["all", "Tensor", "(2, 3)", "float32", "cpu", "24 B", "", ""]]
    assert table["large"] == [["all", "Tensor", "(400, 300)", "float32", "cpu", "468.8 KiB", "", ""]]
    assert table["large_that_differs"][0][-1] == "≠ value"
    assert [(r[0], r[2], r[-1]) for r in table["shape_differs"]] == [
        ("0", "(1,)", "≠ shape"),
        ("1", "(2,)", "≠ shape"),
    ]
    assert [r[3] for r in table["dtype_differs"]] == ["float32", "bfloat16"]
    assert table["dtype_differs"][0][-1] == "≠ dtype"
    assert [(r[1], r[-1]) for r in table["type_differs"]] == [("int", "≠ type"), ("str", "≠ type")]
    assert [(r[-2], r[-1]) for r in table["lr"]] == [("0.1", "≠ value"), ("0.2", "≠ value")]
    assert [(r[0], r[-1]) for r in table["second_only"]] == [("1", "≠ not on rank 0")]
    assert [table[name][0][-1] for name in ("array", "array_differs")] == ["", "≠ value"]
    assert [table[name][0][-1] for name in ("model", "model_differs")] == ["", "≠ value"]
    assert [r[-2] for r in table["items_differ"]] == ["3 items", "4 items"]
    assert (table["items"][0][-2:], table["nan"][0][-2:]) == (["3 items", ""], ["nan", ""])
    assert table["frame"][0][1:3] == ["DataFrame", "(2, 2)"]
    assert table["model"][0][1:] == ["Linear", "", "float32", "cpu", "4.8 KiB", "1,240 parameters", ""]
    assert table["ddp"][0][1] == "DistributedDataParallel(Linear)"
    assert table["optimizer"][0][-2] == "2 parameter tensors, lr 0.5"
    assert (table["lazy"][0][-2], table["sparse"][0][-2]) == ("no shapes yet", "sparse_coo")
    assert table["function"] == [["all", "function", "", "", "", "", "", ""]]
    assert table["Differs"] == [["all", "class", "", "", "", "", "", "≠ value"]]
    assert table["broken"][0][-2] == table["broken_list"][0][-2] == "cannot be read: RuntimeError"


def test_what_nobody_made_is_left_out(notebook: Kernel) -> None:
    notebook.run("%distributed device = 'mine'")
    names = set(rows(notebook.run("%nbgpu vars")))
    assert {"Broken", "device"} <= names
    assert not {"rank", "world_size", "torch", "dist", "np", "pd", "In", "Out", "exit"} & names
    assert "DistributedDataParallel" not in names
    assert not [name for name in names if name.startswith("_")]


def test_a_pattern_and_the_plain_text(notebook: Kernel) -> None:
    done = notebook.run("%nbgpu vars s*only")
    assert set(rows(done)) == {"second_only"}
    heading, line = done.displays[0]["text/plain"].splitlines()
    assert heading.split() == ["name", "rank", "type", "content", "ranks", "differ"]
    assert line.split() == ["second_only", "1", "str", "'b'", "≠", "not", "on", "rank", "0"]
    nothing = notebook.run("%nbgpu vars never*").displays[0]["text/plain"]
    assert nothing == "the ranks have no variables of such a name"


def test_from_python_it_is_a_frame(notebook: Kernel) -> None:
    notebook.run("import nbgpu\nframe = nbgpu.current().vars('same')")
    assert eval(notebook.run("frame.to_dict('records')").value) == [
        {
            "name": "same",
            "rank": rank,
            "type": "Tensor",
            "shape": "(2, 3)",
            "dtype": "float32",
            "device": "cpu",
            "bytes": 24,
            "content": "",
            "ranks differ": "",
        }
        for rank in (0, 1)
    ]
    assert notebook.run("len(nbgpu.current().vars('never'))").value == "0"


def test_it_changes_nothing_on_the_ranks(notebook: Kernel) -> None:
    look = "%distributed print(sorted(n for n in globals() if not n.startswith('_')), _)"
    notebook.run("%distributed 'the last value'")
    before = sorted(notebook.run(look).stdout.splitlines())
    notebook.run("%nbgpu vars")
    assert sorted(notebook.run(look).stdout.splitlines()) == before
    assert before[0].endswith("the last value")
