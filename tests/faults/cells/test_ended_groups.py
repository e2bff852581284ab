"""`dist.destroy_process_group()`, the last line of scripts for torchrun, in a cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import faults
import pytest
from kernel import Kernel
from rows import Measured, row

SUM = "%%distributed\ntotal = torch.ones(1); dist.all_reduce(total)\nint(total), kept"
WELL = [["(2, 0)"], ["(2, 7)"]]
TOLD = "ended the process group (dist.destroy_process_group()), and it was formed again"


@pytest.fixture(autouse=True)
def ranks_are_well_afterwards(notebook: Kernel) -> Iterator[None]:
    assert notebook.run("%%distributed\nkept = 7 * rank").status == "ok"
    yield
    done = notebook.run(SUM)
    assert done.said(0, 1) == WELL, done.error + done.stderr
    assert "formed again" not in notebook.run(SUM).stderr


WAYS = {
    "all ranks": "dist.destroy_process_group()",
    "one rank": "if rank == 0: dist.destroy_process_group()",
    "all ranks, with groups of their own,": "own = dist.new_group([0, 1]); dist.barrier(own); dist.destroy_process_group()",
    "one rank, twice,": "own = dist.new_group([0, 1])\nif rank: dist.destroy_process_group(own); dist.destroy_process_group()",
}


@row(
    "dist.destroy_process_group() in a cell, by {who}",
    "the group is formed again before the next cell, with one line of notice; variables are kept",
    bound_s=2,
)
@pytest.mark.parametrize("who", WAYS)
def test_an_ended_group_is_formed_again_before_the_next_cell(
    notebook: Kernel, measured: Measured, who: str
) -> None:
    done = notebook.run(f"%%distributed\n{WAYS[who]}\n{faults.note()}")
    assert done.status == "ok", done.error
    done = notebook.run(SUM)
    measured.ended(done.stderr)
    assert done.said(0, 1) == WELL, done.error
    named = {"all": "ranks 0-1", "one": "rank 1" if "twice" in who else "rank 0"}[who.partition(" ")[0]]
    assert f"{named} had {TOLD}" in done.stderr
    assert done.stderr.count("formed again") == 1


def test_ddp_goes_on_where_the_group_was_ended(notebook: Kernel) -> None:
    make = "torch.manual_seed(0)\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))"
    notebook.run(f"%%distributed\n{make}\ndist.destroy_process_group()")
    done = notebook.run(
        "%%distributed\nddp(torch.full((1, 2), float(rank))).sum().backward()\nfloat(ddp.module.weight.grad[0, 0])"
    )
    assert done.said(0, 1) == [["0.5"], ["0.5"]], done.error
    assert TOLD in done.stderr


def test_only_a_subgroup_that_was_ended_is_gone(notebook: Kernel) -> None:
    notebook.run("%%distributed\nown = dist.new_group([0, 1]); dist.destroy_process_group(own)")
    done = notebook.run(SUM)
    assert done.said(0, 1) == WELL
    assert done.stderr == ""
    # And with a failure, in which what belonged to groups is looked at.
    done = notebook.run(f"%%distributed\n{faults.at(1, 'raise')}\ndist.barrier()")
    assert done.error.startswith("on rank 1:")
    assert "make it again" not in done.stderr


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_failure_beside_the_end_of_the_group(notebook: Kernel, bad: int, where: str) -> None:
    """One rank ends the group and raises, or raises where the other has ended it; the other waits for it."""
    lines = ["if rank == 0: dist.destroy_process_group()", faults.at(bad, "raise")]
    if where == "before":
        lines.reverse()
    done = notebook.run("\n".join(["%%distributed", *lines, "if rank == 1: dist.barrier()"]), timeout_s=15)
    assert done.status == "error"
    assert f"on rank {bad}:" in done.error
    assert "ValueError: on purpose" in done.error


@pytest.mark.long
def test_a_run_begins_where_the_group_was_ended(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run("%%distributed\ndist.destroy_process_group()")
    settings = {**faults.ENDLESS, "steps": 2, "threads": 1, "runs_dir": str(tmp_path)}
    done = notebook.run(
        f"import nbgpu\nrun = nbgpu.current().train('autoencoder', **{settings!r}).wait(400)\nrun.status"
    )
    assert done.value == "'finished'", done.error
    assert f"ranks 0-1 had {TOLD}" in done.stderr
