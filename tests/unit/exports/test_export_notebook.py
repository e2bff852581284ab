"""A notebook's distributed cells as a script: what is in it, and what is said to stay behind."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from nbgpu.errors import ConfigError
from nbgpu.exports import notebook

_CELLS = [
    "%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2",
    "import math\nscale = math.pi\nunused = 1",
    "plot = 'only here'",
    "%%distributed --into losses --timeout 60\nfrom torch import nn\nmodel = nn.Linear(4, 1)\n%time model\n!ls",
    "%%distributed --ranks 0\nprint('first', scale)",
    "%%distributed\nname = input('name? ')",
    "%%distributed --ranks 0\ntext = '''a\nb'''",
    "%pull losses",
    "%nbgpu debug",
    "%%time\nmath.sqrt(2)",
]


def write(path: Path, cells: list[str]) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(made, path)
    return path


def test_the_script_has_the_cells_of_the_ranks_and_what_they_need(tmp_path: Path) -> None:
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", _CELLS))
    ast.parse(script.text)
    assert "model = nn.Linear(4, 1)" in script.text
    assert "scale = math.pi" in script.text
    assert "if rank in [0]:\n    print('first', scale)" in script.text
    for absent in ("only here", "input(", "a\nb", "sqrt"):
        assert absent not in script.text
    notes = "\n".join(script.notes)
    for said in (
        *("cell 1 stays behind", "cell 3 stays behind: no distributed cell uses", "cell 4: --into does not"),
        *("cell 4: --timeout", "cell 4: %time model", "cell 4: !ls", "cell 6: left out, because it asks"),
        *("cell 7: left out, because --ranks would indent", "cell 8: %pull losses", "cell 9: %nbgpu debug"),
        *("cell 10: %%time does not carry over", "no checkpoints"),
    ):
        assert said in notes, notes
    assert "cell 2" not in notes


def test_a_name_that_only_the_notebook_has_is_named(tmp_path: Path) -> None:
    cells = ["import nbgpu\ncluster = nbgpu.Cluster()\nlr = 0.1", "%%distributed\nprint(lr)"]
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", cells))
    assert "cell 2 uses lr, which no earlier part of the script defines" in script.notes
    assert "cell 1 stays behind: it is about the notebook's cluster" in script.notes


@pytest.mark.parametrize(
    "changed",
    [
        "lr *= 2",
        "for _ in range(2):\n    lr *= 2",
        "def double():\n    global lr\n    lr *= 2\ndouble()\nlr = lr",
        "if debug:\n    lr = 1",
        "try:\n    lr = tuned\nexcept NameError:\n    pass",
        "%%distributed --ranks 0\nlr = 1",
        "%%distributed\nlr += 1",
    ],
)
def test_an_earlier_definition_stays_where_a_cell_changes_it_or_may_not_define_it(
    tmp_path: Path, changed: str
) -> None:
    cells = ["debug = False", "lr = 0.1", changed, "%%distributed\nprint(lr)"]
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", cells))
    assert "lr = 0.1" in script.text
    assert changed.splitlines()[-1] in script.text


@pytest.mark.parametrize("again", ["lr = 1", "with open('lr') as file:\n    lr = file.read()", "import lr"])
def test_an_earlier_definition_that_is_replaced_stays_behind(tmp_path: Path, again: str) -> None:
    cells = ["lr = 0.1", again, "%%distributed\nprint(lr)"]
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", cells))
    assert "lr = 0.1" not in script.text
    assert again in script.text


def test_a_name_that_is_only_changed_or_deleted_is_named(tmp_path: Path) -> None:
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", ["%%distributed\nlr *= 2\ndel rest"]))
    assert "cell 1 uses lr, rest, which no earlier part of the script defines" in script.notes


def test_names_of_handlers_and_patterns_are_the_cells_own(tmp_path: Path) -> None:
    cell = (
        "%%distributed\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n    print(error)\n"
        "match [1, {2: 3}]:\n    case [head, *tail]:\n        print(head, tail)\n"
        "match {}:\n    case {**others} as whole:\n        print(others, whole)"
    )
    notes = notebook.build_script(write(tmp_path / "lesson.ipynb", [cell])).notes
    assert not [note for note in notes if "no earlier part" in note]


def test_an_await_is_named_and_code_that_only_speaks_of_one_is_not(tmp_path: Path) -> None:
    cells = [
        "%%distributed\nimport asyncio\nawait asyncio.sleep(0)",
        "%%distributed\n!ls\ny = 1 +  # do not await",
        "%%distributed\nprint(1)",
    ]
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", cells))
    compile(script.text, "script", "exec")
    assert "cell 1: left out, because it uses await outside of a function" in script.notes
    assert "cell 2: left out, because it is no plain Python (invalid syntax)" in script.notes


def test_a_plain_cell_that_asks_is_left_out(tmp_path: Path) -> None:
    cells = ["n = int(input('how many? '))", "%%distributed\nprint(n)"]
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", cells))
    assert "input(" not in script.text
    assert "cell 1: left out, because it asks with input(), and nobody answers a job" in script.notes
    assert "cell 2 uses n, which no earlier part of the script defines" in script.notes


def test_names_that_a_comprehension_or_a_star_import_defines_are_there(tmp_path: Path) -> None:
    cells = [
        "from math import *",
        "if any((first := x) > 2 for x in range(9)):\n    pass",
        "%%distributed\nprint(first, pi)",
    ]
    script = notebook.build_script(write(tmp_path / "lesson.ipynb", cells))
    assert "from math import *" in script.text
    assert "first := x" in script.text
    assert not [note for note in script.notes if "no earlier part" in note]


def test_a_notebook_without_distributed_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to export"):
        notebook.build_script(write(tmp_path / "plain.ipynb", ["x = 1"]))
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(ConfigError, match="is not a notebook"):
        notebook.build_script(tmp_path / "broken.ipynb")
