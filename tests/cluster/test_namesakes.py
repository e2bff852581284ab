"""Files beside the notebook that have the names of modules of the standard library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel import Kernel, kernel
from rows import row

pytestmark = pytest.mark.cold

SETTINGS = "data='phantoms', patch_size=16, num_phantoms=8, steps=2, val_every=0"


def _names_that_kernels_bear() -> set[str]:
    """All but those of which Python itself makes use before ipykernel takes the working folder off its
    path."""
    code = "import runpy, pkgutil, pathlib, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    used = {name.partition(".")[0] for name in done.stdout.split()}
    return {n for n in sys.stdlib_module_names - used if not n.startswith("_") and n not in ("nt", "winreg")}


@pytest.fixture(scope="module")
def beside_namesakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with two ranks in a folder in which nearly every module of the standard library has a
    namesake."""
    folder = tmp_path_factory.mktemp("namesakes")
    for name in _names_that_kernels_bear():
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name} of the person')")
    (folder / "helper.py").write_text("answer = 42")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with kernel() as started:
            done = started.run("%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2")
            assert done.status == "ok", done.error
            yield started
            started.run("%nbgpu stop")


@pytest.mark.long
@row(
    "beside the notebook are files named like the modules of the standard library: random.py, logging.py, queue.py, ...",
    "the cluster starts and trains, also a recipe in that folder, with worker processes",
    bound_s=None,
)
def test_a_cluster_starts_and_trains_beside_them(beside_namesakes: Kernel) -> None:
    run = "import nbgpu; print(nbgpu.current().train({}).wait(400).status)"
    done = beside_namesakes.run(run.format(f"'autoencoder', {SETTINGS}, num_workers=1, tensorboard=True"))
    assert done.stdout.endswith("finished\n"), done.error
    assert (
        beside_namesakes.run(
            "from nbgpu.config import own_file as recipe_files\nmine = recipe_files.create('mine')"
        ).status
        == "ok"
    )
    done = beside_namesakes.run(run.format("'mine.py', steps=2, num_workers=1"))
    assert beside_namesakes.run("mine.unlink()").status == "ok", "the next try makes it again"
    assert done.stdout.endswith("finished\n"), done.error


def test_modules_are_found_as_in_a_plain_cell(beside_namesakes: Kernel) -> None:
    """The standard library comes first, then the notebook's folder, then what is installed."""
    where = """
import queue, helper, os, sys
print(queue.Queue.__name__, helper.answer, sys.path.index("") > sys.path.index(os.path.dirname(os.__file__)))
"""
    plain = beside_namesakes.run(where).stdout
    assert plain == "Queue 42 True\n"
    assert beside_namesakes.run(f"%%distributed{where}").said(0, 1) == [plain.splitlines()] * 2


@pytest.mark.parametrize("use", ["from queue import mine", "import queue; queue.mine"])
def test_the_hidden_file_is_named(beside_namesakes: Kernel, use: str) -> None:
    error = beside_namesakes.run(f"%%distributed\n{use}").error
    taken, hidden = error.partition("Several modules are called 'queue'. This one is ")[2].split(
        ", and hides "
    )
    assert Path(taken).parent == Path(subprocess.__file__).parent
    assert Path(hidden.splitlines()[0]).name == "queue.py"
    assert Path(hidden.splitlines()[0]).parent.name.startswith("namesakes")


@pytest.mark.long
def test_the_last_words_of_a_parent_that_ends_at_once(tmp_path: Path) -> None:
    """ipyparallel would take its log away as soon as the kernel's event loop turns."""
    (tmp_path / "dataclasses.py").write_text("raise RuntimeError('the last words')")
    with kernel() as started:
        assert started.run("%load_ext nbgpu").status == "ok"
        done = started.run(
            f"import os\nos.environ['PYTHONPATH'] = {str(tmp_path)!r}\n%nbgpu start --gpus none --ranks 1"
        )
        assert "ended during the start" in done.error
        assert "RuntimeError: the last words" in done.error
