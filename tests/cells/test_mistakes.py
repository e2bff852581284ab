"""Mistakes that everybody makes once: what is said about them, and that other errors stay as they are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import IPython
import launching
import pytest
from kernel import Kernel, kernel

from nbgpu.protocol.records import GIVEN_NAMES

RANKS_HAVE = "begin the cell with %%distributed"


@pytest.fixture(autouse=True)
def without_files_of_torch() -> Iterator[None]:
    """Removes the files in which torch's processes write their errors, and which torch leaves behind."""
    yield
    for left in Path(tempfile.gettempdir()).glob("pytorch-errorfile-*"):
        left.unlink()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        started.run(
            "%%distributed\nloss = 0.5\nif rank == 1: second = 3\ndef train(rank, world_size): pass\n"
            "import fractions"
        )
        started.run(
            "import math, nbgpu\nlr, decay = 0.1, 0.2\ncluster = nbgpu.current()\ndef f(): return loss\n"
            "class A:\n    def g(self): return loss\n"
            "def h(): return (lambda: loss)()\n"
            "def local():\n    if not lr: rank = 1\n    return rank"
        )
        yield started
        started.run("%nbgpu stop")


def test_every_rank_has_what_it_is_said_to_be_given(notebook: Kernel) -> None:
    done = notebook.run(f"%%distributed\n[name in globals() for name in {GIVEN_NAMES!r}]")
    assert done.said(0, 1) == [[str([True] * len(GIVEN_NAMES))]] * 2


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("rank", f"rank is on the ranks: {RANKS_HAVE}"),
        ("x = torch.zeros(world_size) * lr", f"torch, world_size are on the ranks: {RANKS_HAVE}"),
        ("fractions.Fraction(loss)", f"fractions, loss are on the ranks: {RANKS_HAVE}"),
        ("loss * 2", f"loss is on the ranks: {RANKS_HAVE}, or copy it here with %pull loss"),
        (
            "second",
            f"second is on rank 1: {RANKS_HAVE} --ranks 1, or copy it here with %pull second --rank 1",
        ),
        ("f()", "loss is on the ranks, and f looked for it in the notebook: %push f, and call it"),
        (
            "[f() for _ in 'a']",
            "loss is on the ranks, and f looked for it in the notebook: %push f, and call it",
        ),
        ("A().g()", "loss is on the ranks, and A.g looked for it in the notebook: %push A, and call it"),
        ("h()", "loss is on the ranks, and h.<lambda> looked for it in the notebook: %push h, and call it"),
        ("%time rank", f"rank is on the ranks: {RANKS_HAVE}"),
        ("await train", f"train is on the ranks: {RANKS_HAVE}"),
    ],
)
def test_a_plain_cell_is_told_what_is_on_the_ranks(notebook: Kernel, cell: str, said: str) -> None:
    if cell.startswith("%time") and IPython.version_info < (8,):
        pytest.skip("before IPython 8 %time shows an error itself, and tells nobody")
    done = notebook.run(cell)
    assert "NameError" in done.error
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "cell",
    [
        "nobody_has_this",
        "local()",
        "raise NameError(\"name 'rank' is not defined\")",
        "import types; m = types.ModuleType('m'); exec('def g(): return rank', m.__dict__); m.g()",
        "try:\n    rank\nexcept NameError:\n    raise ValueError",
        "1 / 0",
    ],
)
def test_of_other_errors_nothing_is_said(notebook: Kernel, cell: str) -> None:
    done = notebook.run(cell)
    assert done.status == "error"
    assert done.stderr == ""


def test_ranks_that_are_busy_are_not_asked(notebook: Kernel) -> None:
    notebook.run(
        "busy = cluster.submit('import time; until = time.time() + 5\\n"
        "while time.time() < until: time.sleep(0.01)')"
    )
    before = notebook.run("[len(cluster.ranks[r].outstanding) for r in range(2)]").value
    assert notebook.run("loss").stderr == ""
    assert notebook.run("torch.zeros(2) + loss").stderr == f"torch is on the ranks: {RANKS_HAVE}\n"
    assert notebook.run("[len(cluster.ranks[r].outstanding) for r in range(2)]").value == before
    assert notebook.run("all(r.ready() for r in busy.values())").value == "False"
    assert notebook.run("[r.get(timeout=180) for r in busy.values()] and 'back'").value == "'back'"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("step = lr * loss", "The notebook has lr: %push lr"),
        ("step = lr * (1 - decay) * loss", "The notebook has lr, decay: %push lr decay"),
        ("def g(): return decay\ng()", "The notebook has decay: %push decay"),
        ("math.pi", "The notebook has imported math: %nbgpu sync repeats its imports on the ranks"),
        ("cluster.train('autoencoder')", "cluster belongs to the notebook alone: take a plain cell"),
    ],
)
def test_a_distributed_cell_is_told_what_the_notebook_has(notebook: Kernel, cell: str, said: str) -> None:
    done = notebook.run(f"%%distributed\n{cell}")
    assert done.error.splitlines()[-1] == said


@pytest.mark.parametrize(
    "cell",
    [
        "nobody_has_this",
        "raise ValueError(\"name 'lr' is not defined\")",
        "def g():\n    if not rank + 1: lr = 1\n    return lr\ng()",
        "import types; m = types.ModuleType('m'); exec('def g(): return lr', m.__dict__); m.g()",
    ],
)
def test_what_the_notebook_has_is_told_for_no_other_error(notebook: Kernel, cell: str) -> None:
    done = notebook.run(f"%%distributed\n{cell}")
    assert done.status == "error"
    assert "notebook" not in done.error


TWICE = "The ranks are one process group already: leave init_process_group out."
NO_GPU = "This rank has no GPU: write .to(device)."
SPAWNED = "The ranks are the processes that mp.spawn makes in a script: call train(rank, ...) itself"
ENDED = "destroy_process_group has ended the group in this cell. Leave it out"
INIT = "dist.init_process_group('gloo', rank=rank, world_size=world_size)"
MP = "import torch.multiprocessing as mp\n"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (INIT, TWICE),
        (f"def setup():\n    {INIT}\nsetup()", TWICE),
        pytest.param(f"{MP}mp.spawn(train, args=(2,), nprocs=1)", SPAWNED, marks=pytest.mark.long),
        (
            f"{MP}def setup(_):\n    {INIT}\nmp.start_processes(setup, nprocs=1, start_method='fork')",
            "The ranks are the processes that mp.spawn makes in a script",
        ),
        ("torch.nn.Linear(1, 1).to(rank)", NO_GPU),
        ("torch.nn.Linear(1, 1).cuda(rank)", NO_GPU),
        ("torch.zeros(\n    1,\n    device=f'cuda:{rank}',\n)", NO_GPU),
        ("torch.cuda.set_device(rank)", NO_GPU),
        pytest.param(
            "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[rank])",
            "Leave device_ids out:",
            marks=pytest.mark.long,
        ),
        (
            "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            "model = DDP(torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]))\n"
            "model.module.forward = model.module[0].forward\n"
            "for _ in range(2): model(torch.ones(1, 1)).sum().backward()",
            "DDP waits for the gradients of weights that this loss does not use.",
        ),
        ("dist.destroy_process_group(); dist.barrier()", ENDED),
        (f"dist.destroy_process_group(); {INIT.replace('gloo', 'nothing')}", ""),
    ],
)
def test_lines_of_scripts_are_explained(notebook: Kernel, cell: str, said: str) -> None:
    done = notebook.run(f"%%distributed\n{cell}")
    assert done.status == "error"
    if said:
        assert done.error.splitlines()[-1].startswith(said), done.error


@pytest.mark.parametrize(
    "cell",
    [
        "raise RuntimeError('Torch not compiled with CUDA enabled')",
        "torch.cuda.synchronize()",
        "torch.zeros(2).to('nowhere')",
        "raise ValueError('trying to initialize the default process group twice!')",
        pytest.param(f"{MP}mp.spawn(divmod, args=(0,), nprocs=1)", marks=pytest.mark.long),
        "dist.all_reduce('text')",
        "torch.zeros(2) @ torch.zeros(3)",
    ],
)
def test_other_errors_are_left_as_they_are(notebook: Kernel, cell: str) -> None:
    done = notebook.run(f"%%distributed\n{cell}")
    assert done.status == "error"
    sentences = (TWICE, NO_GPU, SPAWNED[:30], ENDED, "Leave device_ids", "torchrun", "spawned")
    assert not any(sentence in done.error + done.stderr for sentence in sentences)


def test_a_process_that_could_not_begin_is_told_after_the_cell(notebook: Kernel) -> None:
    start = "import multiprocessing\np = multiprocessing.get_context('{}').Process(target={}, args=(0, 2)); p.start(); p.join()"
    done = notebook.run("%%distributed\n" + start.format("spawn", "train"))
    assert done.status == "ok"
    told = "train: a process that is spawned cannot find a function of a cell. To train, start none"
    assert done.stderr.count(told) == 1
    for way, target in (("fork", "train"), ("spawn", "print")):
        done = notebook.run("%%distributed\n" + start.format(way, target))
        assert "spawned" not in done.stderr


def test_the_end_of_the_group_is_told_with_what_comes_next(notebook: Kernel) -> None:
    done = notebook.run("%%distributed\ndist.destroy_process_group()")
    assert done.status == "ok"
    assert done.stderr.startswith("ranks 0, 1 ended the process group: the next cell gets a new one")
    done = notebook.run("%%distributed\ndist.get_world_size()")
    assert done.said(0, 1) == [["2"], ["2"]]
    assert "needs no destroy_process_group" not in notebook.run("%%distributed\nrank").stderr
