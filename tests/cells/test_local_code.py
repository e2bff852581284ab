"""Code of the notebook on the ranks: pushed functions and classes, its imports, modules that are edited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launching
import pytest
from kernel import Kernel, kernel

DEFINITIONS = """
import math
import functools
from dataclasses import dataclass

def scaled(value):
    "Multiplies."
    return value * scale

area = lambda radius: math.pi * radius ** 2

class Base:
    def greet(self):
        return "base"

class Child(Base):
    def greet(self):
        return super().greet() + " and child"

@dataclass
class Point:
    x: int = 1

def with_default(n=start):
    return n

def adder(n):
    def add(value):
        return value + n
    return add

add_three = adder(3)

def fails(value):
    half = value / 2
    raise ValueError(f"half is {half}")

class Counter:
    def __init__(self, count):
        self.count = count

def recursive(n):
    return 1 if n == 0 else n * recursive(n - 1)
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        assert started.run(f"scale, start = 3, 10\n{DEFINITIONS}").status == "ok"
        yield started
        started.run("%nbgpu stop")


def on_ranks(notebook: Kernel, expression: str) -> list[Any]:
    """The value of an expression on each rank."""
    done = notebook.run(f"%distributed print(rank, __import__('json').dumps(({expression})))")
    assert done.status == "ok", done.error
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert [line[:2] for line in lines] == ["0 ", "1 "]
    return [json.loads(line[2:]) for line in lines]


def test_a_function_finds_its_globals_on_the_rank(notebook: Kernel) -> None:
    told = notebook.run("%push scaled")
    assert told.stderr == "scaled uses `scale`, which the ranks do not have: %push scale\n"
    notebook.run("%distributed scale = 100 + rank")
    assert on_ranks(notebook, "scaled(1)") == [100, 101]
    notebook.run("%distributed scale = 1")
    assert on_ranks(notebook, "scaled(7)") == [7, 7]
    assert notebook.run("%push scaled").stderr == ""
    missing = notebook.run("%%distributed --ranks 1\ndel scale")
    assert missing.status == "ok"
    assert "rank 1 does not have: %push scale" in notebook.run("%push scaled").stderr
    assert on_ranks(notebook, "'scale' in globals()") == [True, False]


def test_its_source_is_there_for_inspect_and_for_tracebacks(notebook: Kernel) -> None:
    notebook.run("%push fails add_three")
    for name, line in (("fails", "    half = value / 2"), ("add_three", "        return value + n")):
        source = on_ranks(notebook, f"__import__('inspect').getsource({name})")
        assert line in source[0].splitlines()
    error = notebook.run("%distributed fails(3)").error
    assert 'raise ValueError(f"half is {half}")' in error
    assert "ValueError: half is 1.5" in error


def test_classes_lambdas_closures_and_second_names(notebook: Kernel) -> None:
    notebook.run("%distributed import math; from dataclasses import dataclass")
    # In no order.
    assert notebook.run("%push Child Point area add_three Base recursive").stderr == ""
    assert on_ranks(notebook, "Child().greet()") == ["base and child"] * 2
    assert on_ranks(notebook, "Point().x") == [1, 1]
    assert on_ranks(notebook, "round(area(1), 2), add_three(4), recursive(4)") == [[3.14, 7, 24]] * 2
    notebook.run("other_name = recursive")
    notebook.run("%distributed recursive = lambda n: 5")
    notebook.run("%push other_name")
    assert on_ranks(notebook, "other_name(3), recursive(3)") == [[15, 5]] * 2


def test_what_a_comprehension_in_a_class_needs_is_there_before_it(notebook: Kernel) -> None:
    notebook.run("def cube(i):\n    return i**3")
    notebook.run(
        "num = 3\nclass Cubes:\n    low = [cube(i) for i in range(3)]\n    high = tuple(num * i for i in range(3))"
    )
    assert "Cubes cannot be defined without `cube`" in notebook.run("%push Cubes").error
    assert notebook.run("%push Cubes num cube").stderr == ""
    assert on_ranks(notebook, "Cubes.low, Cubes.high") == [[[0, 1, 8], [0, 3, 6]]] * 2


def test_data_that_a_definition_needs_and_data_that_needs_a_definition(notebook: Kernel) -> None:
    refused = notebook.run("%push with_default").error
    assert (
        "with_default cannot be defined without `start`, which the ranks do not have: %push start" in refused
    )
    assert on_ranks(notebook, "'with_default' in globals()") == [False, False]
    assert notebook.run("counter = Counter(4)\n%push with_default start Counter counter").stderr == ""
    assert (
        on_ranks(notebook, "with_default(), counter.count, type(counter) is Counter") == [[10, 4, True]] * 2
    )


def test_a_module_defined_in_a_plain_cell_trains_on_the_ranks(notebook: Kernel) -> None:
    notebook.run(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(2, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    assert "Net cannot be defined without `nn`" in notebook.run("%push Net").error
    notebook.run("%distributed from torch import nn")
    assert notebook.run("%push Net").stderr == ""
    done = notebook.run(
        "%%distributed\n"
        "ddp = nn.parallel.DistributedDataParallel(Net())\n"
        "ddp(torch.full((1, 2), float(rank))).sum().backward()"
    )
    assert done.status == "ok", done.error
    assert on_ranks(notebook, "ddp.module.layer.weight.grad.tolist()") == [[[0.5, 0.5]]] * 2


def test_what_has_no_source_says_so(notebook: Kernel) -> None:
    assert "its source is not known" in notebook.run("exec('class Hidden: pass')\n%push Hidden").error


def test_where_something_cannot_travel_nothing_is_sent(notebook: Kernel) -> None:
    notebook.run("def never_sent():\n    return 1")
    refused = notebook.run("generator = (n for n in [])\n%push never_sent generator")
    assert "generator cannot travel" in refused.error
    assert on_ranks(notebook, "'never_sent' in globals()") == [False, False]


def test_sync_sends_the_notebooks_imports(notebook: Kernel, tmp_path: Path) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("VALUE = 12\n")
    notebook.run(
        "import os.path as osp\n"
        "from fractions import Fraction, Fraction as device\n"
        "try:\n    import colorsys\nexcept ImportError:\n    pass\n"
        "import wave\ndel wave\n"
        "def inner():\n    import chunk_of_nothing\n"
        f"import sys\nsys.path.append({str(tmp_path)!r})\n"
        "import types\nsys.modules['only_in_kernel'] = types.ModuleType('only_in_kernel')"
    )
    notebook.run("import only_in_kernel, beside_the_notebook")
    done = notebook.run("names_before = set(globals())\n%nbgpu sync")
    assert done.status == "ok", done.error
    sent, folders, *failed = done.stdout.splitlines()
    for statement in ("import os.path as osp", "from fractions import Fraction;", "import colorsys"):
        assert statement in sent
    assert str(tmp_path) in folders
    assert "wave" not in sent
    assert failed == [
        "not on ranks 0-1: from fractions import Fraction as device (nbgpu or IPython gives the ranks another device)",
        "not on ranks 0-1: import only_in_kernel (ModuleNotFoundError: No module named 'only_in_kernel')",
    ]
    assert on_ranks(notebook, "str(device), beside_the_notebook.VALUE, osp.sep") == [["cpu", 12, "/"]] * 2
    new = notebook.run("sorted(n for n in set(globals()) - names_before if not n.startswith('_i'))")
    assert new.value == "['names_before']"


def test_an_edited_module_is_loaded_anew_before_the_next_cell(notebook: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "edited_by_hand.py"
    module.write_text("def answer():\n    return 'old'\n")
    assert notebook.run("%nbgpu autoreload").stdout == "autoreload is off\n"
    assert notebook.run("%nbgpu autoreload on").stdout.startswith("autoreload is on")
    imported = (
        f"%%distributed\nimport sys\nsys.path.append({str(tmp_path)!r})\nfrom edited_by_hand import answer"
    )
    assert notebook.run(imported).stderr == ""
    module.write_text("def answer():\n    return 'entirely new'\n")
    done = notebook.run("%%distributed --ranks 1\nprint(answer())")
    assert done.stdout == "[1] entirely new\n"
    # Also on the rank that the cell was not for, and said once.
    later = notebook.run("%%distributed\nprint(rank, answer())")
    assert later.stdout.count("entirely new") == 2
    assert done.stderr + later.stderr == "edited_by_hand was edited, and loaded again\n"
    assert notebook.run("%%distributed\nprint(rank, answer())").stderr == ""

    module.write_text("def answer():\n    return 'half a file\n")
    broken = notebook.run("%%distributed\nprint(rank, answer())")
    assert broken.stdout.count("entirely new") == 2
    assert "edited_by_hand could not be loaded again, and stays as it was: SyntaxError" in broken.stderr
    assert "edited_by_hand.py line 2" in broken.stderr
    assert notebook.run("%%distributed\nprint(rank, answer())").stderr == ""

    assert notebook.run("%nbgpu autoreload off").stdout == "autoreload is off\n"
    module.write_text("def answer():\n    return 'nobody reads this'\n")
    assert notebook.run("%%distributed\nprint(rank, answer())").stdout.count("entirely new") == 2


def test_autoreload_loads_what_was_edited_before_it_was_switched_on(notebook: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "edited_before.py"
    module.write_text("def answer():\n    return 'old'\n")
    unchanged = tmp_path / "unchanged_since.py"
    unchanged.write_text("def answer():\n    return 'as it was'\n")
    notebook.run("%nbgpu autoreload off")
    code = f"import sys\nsys.path.append({str(tmp_path)!r})\nimport unchanged_since\nfrom edited_before import answer"
    assert notebook.run(f"%%distributed\n{code}\nanswer()").stdout == "[0-1] 'old'\n"
    module.write_text("def answer():\n    return 'entirely new'\n")
    on = notebook.run("%nbgpu autoreload on").stdout.splitlines()
    assert on[0].startswith("autoreload is on")
    # What other tests have edited comes, too.
    assert "edited_before was edited, and loaded again" in on
    assert not any("unchanged_since" in line for line in on)
    done = notebook.run("%%distributed\nanswer()")
    assert (done.stdout, done.stderr) == ("[0-1] 'entirely new'\n", "")
    # Between off and on, too.
    notebook.run("%nbgpu autoreload off")
    module.write_text("def answer():\n    return 'newer still'\n")
    assert "edited_before was edited" in notebook.run("%nbgpu autoreload on").stdout
    assert notebook.run("%distributed answer()").stdout == "[0-1] 'newer still'\n"
    notebook.run("%nbgpu autoreload off")


@pytest.mark.long
def test_without_imports_sync_says_so() -> None:
    with kernel() as notebook:
        notebook.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags(1)}")
        assert notebook.run("%nbgpu sync").stdout == "the notebook has no imports to repeat\n"
        assert notebook.run("import sys\n'torch' in sys.modules").value == "False"
        notebook.run("%nbgpu stop")
