"""Libraries and scripts find in a rank's environment what torchrun sets, and a rank's children do not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from kernel import Kernel

NAMES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
]
SEEN = "{name: os.environ.get(name) for name in names}"
BY_CHILD = f"import json, os; names = {NAMES!r}; print(json.dumps([n for n in names if n in os.environ]))"
OF_CHILD = (
    f"subprocess.run([sys.executable, '-c', {BY_CHILD!r}], capture_output=True, text=True).stdout.strip()"
)


@pytest.fixture(autouse=True)
def imports(notebook: Kernel) -> None:
    notebook.run(f"%%distributed\nimport os, subprocess, sys\nnames = {NAMES!r}")


def seen_by(notebook: Kernel, *ranks: int) -> list[dict[str, str]]:
    done = notebook.run(f"%%distributed\nimport os\nprint({SEEN.replace('names', repr(NAMES))})")
    assert done.status == "ok", done.error
    return [eval(lines[0]) for lines in done.said(*ranks)]


@pytest.mark.one_host("says what one host gives")
def test_a_rank_has_what_torchrun_sets(notebook: Kernel) -> None:
    for rank, seen in enumerate(seen_by(notebook, 0, 1)):
        assert int(seen.pop("MASTER_PORT")) > 0
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
        }
    assert len({seen["MASTER_PORT"] for seen in seen_by(notebook, 0, 1)}) == 1
    torch_says = notebook.run(
        "%%distributed\nimport sys\n(dist.is_torchelastic_launched(), hasattr(sys, 'ps1'))"
    )
    assert torch_says.said(0, 1) == [["(True, False)"]] * 2


@pytest.mark.parametrize(
    "before",
    [
        "",
        # accelerate and mock.patch.dict assign what they have read.
        "for name in names: os.environ[name] = os.environ[name]",
    ],
)
def test_a_program_that_a_cell_starts_is_no_rank(notebook: Kernel, before: str) -> None:
    assert notebook.run(f"%%distributed\n{before}").status == "ok"
    spawned = (
        "import multiprocessing\n"
        "with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.apply(os.getenv, ('RANK',)))"
    )
    done = notebook.run(f"%%distributed\nprint({OF_CHILD})\n!echo shell: $RANK $WORLD_SIZE\n{spawned}")
    assert done.said(0, 1) == [["[]", "shell:", "None"]] * 2, done.written
    done = notebook.run(
        "%%distributed\nfor name in names: os.environ[name] = os.environ[name]\n!echo shell: $RANK"
    )
    assert done.said(0, 1) == [["shell:"]] * 2


def test_workers_of_a_loader_are_of_the_rank(notebook: Kernel) -> None:
    done = notebook.run(
        "%%distributed\n"
        "class Ranks(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n"
        "        yield int(os.environ['RANK']) + 10 * dist.get_rank()\n"
        "print([int(batch) for batch in torch.utils.data.DataLoader(Ranks(), num_workers=1)])"
    )
    assert done.said(0, 1) == [["[0]"], ["[11]"]], done.error


def test_what_a_person_sets_reaches_the_children(notebook: Kernel) -> None:
    """Who prepares the environment of a program sets all of it."""
    notebook.run("%%distributed --ranks 0\nos.environ |= {'RANK': '0', 'WORLD_SIZE': '1'}")
    child = notebook.run(f"%%distributed --ranks 0\nprint({OF_CHILD})")
    assert child.said(0) == [['["RANK", "WORLD_SIZE"]']]
    notebook.run("%%distributed --ranks 0\nos.environ['WORLD_SIZE'] = '2'")
    assert notebook.run(f"%%distributed --ranks 0\nprint({OF_CHILD})").said(0) == [["[]"]]


@pytest.mark.long
def test_a_world_of_its_own_under_torchrun(notebook: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "if dist.get_rank() == 0: print('the sum is', int(total), os.environ['LOCAL_WORLD_SIZE'])\n"
        "dist.destroy_process_group()\n"
    )
    start = f"{sys.executable} -m torch.distributed.run --log-dir {tmp_path} --standalone --nproc-per-node 3 {script}"
    done = notebook.run(
        f"%%distributed --ranks 1\n!{start} 2>/dev/null\ndist.get_world_size()", timeout_s=180
    )
    assert done.said(1) == [["the sum is 3 3", "2"]], done.written


def test_a_group_of_the_persons_own_meets_at_the_master(notebook: Kernel, tmp_path: Path) -> None:
    for number in range(2):
        # As under torchrun, rank 1 must not connect while rank 0 still has the store of the group before.
        own = (
            f"import pathlib, time\nended = pathlib.Path({str(tmp_path / str(number))!r})\n"
            "dist.destroy_process_group()\nif rank == 0: ended.touch()\nwhile not ended.exists(): time.sleep(0.01)\n"
            "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\nint(x)"
        )
        done = notebook.run(f"%%distributed\n{own}")
        assert done.said(0, 1) == [["2"]] * 2, done
    # The group of that cell is given up and formed again like any other.
    assert notebook.run("%%distributed\nif rank == 1: 1 / 0\ndist.barrier()").status == "error"
    assert (
        notebook.run("%%distributed\nx = torch.ones(1); dist.all_reduce(x); int(x)").said(0, 1) == [["2"]] * 2
    )


@pytest.mark.usefixtures("ranks_may_be_replaced")
def test_they_are_right_after_a_rank_was_replaced(notebook: Kernel) -> None:
    for victim in (1, 0):
        pid = notebook.run(f"%%distributed --ranks {victim}\nimport os\nprint(os.getpid())").said(victim)[0][
            0
        ]
        os.kill(int(pid), signal.SIGKILL)
        notebook.run("%%distributed\ndist.barrier()")
        first, second = seen_by(notebook, 0, 1)
        assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
        assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.usefixtures("ranks_may_be_replaced")
@pytest.mark.one_host("resizes beyond what two test hosts have")
def test_they_follow_the_number_of_ranks(notebook: Kernel) -> None:
    for number in (3, 2):
        assert notebook.run(f"%nbgpu resize {number}").status == "ok"
        seen = seen_by(notebook, *range(number))
        assert [each["RANK"] for each in seen] == [str(rank) for rank in range(number)]
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            assert {each[name] for each in seen} == {str(number)}
        assert len({each["MASTER_PORT"] for each in seen}) == 1
