"""pdb on ranks: breakpoints, and a look at what a failed cell left."""

from __future__ import annotations

import pytest
from kernel import Kernel

BOUND_S = 30
SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"
FAILS = (
    "%%distributed\n"
    "def share(total, by):\n    apples = total * 3\n    dist.barrier()\n    return apples / by\n"
    "share(7, 1 - rank)\ndist.barrier()"
)
"""Rank 1 fails, rank 0 waits for it."""


@pytest.mark.parametrize("command", ["%debug", "%nbgpu debug"])
def test_debug_shows_the_variables_of_the_rank_that_failed_first(notebook: Kernel, command: str) -> None:
    assert "ZeroDivisionError" in notebook.run(FAILS, timeout_s=BOUND_S).error
    done = notebook.run(command, answers=["p apples, by", "up", "p rank", "w", "q"], timeout_s=BOUND_S)
    assert done.status == "ok", done.error
    assert done.prompts == ["rank 1: ipdb> "] * 5
    assert done.stdout.startswith("rank 1 failed with ZeroDivisionError")
    assert "[1] (21, 0)\n" in done.stdout
    assert "[1] 1\n" in done.stdout
    assert "site-packages" not in done.stdout
    assert notebook.run(SUM).stdout == "[0-1] 2\n"


def test_another_rank_can_be_looked_at_and_more_than_once(notebook: Kernel) -> None:
    notebook.run(FAILS, timeout_s=BOUND_S)
    for _ in range(2):
        done = notebook.run("%nbgpu debug --rank 0", answers=["p rank", "q"], timeout_s=BOUND_S)
        assert "[0] 0\n" in done.stdout
    assert notebook.run(SUM).stdout == "[0-1] 2\n"
    assert "no rank has a failure to look at" in notebook.run("%nbgpu debug", timeout_s=BOUND_S).error


def test_stop_ends_the_debugger(notebook: Kernel) -> None:
    notebook.run(FAILS, timeout_s=BOUND_S)
    stop = notebook.manager.interrupt_kernel
    assert "the cell was stopped" in notebook.run("%debug", answers=["up", stop], timeout_s=BOUND_S).error
    done = notebook.run("%debug", answers=["p by", "q"], timeout_s=BOUND_S)
    assert "[1] 0\n" in done.stdout
    assert notebook.run(SUM).stdout == "[0-1] 2\n"


def test_debug_after_a_stopped_cell_shows_where_it_was(notebook: Kernel) -> None:
    code = "%%distributed\ndef wait(n):\n    print('waits', flush=True)\n    while True: n += 1\nwait(rank)"
    done = notebook.run(code, meanwhile=notebook.manager.interrupt_kernel, timeout_s=BOUND_S)
    assert "the cell was stopped" in done.error
    done = notebook.run("%nbgpu debug --rank 1", answers=["p n > 1", "q"], timeout_s=BOUND_S)
    assert "[1] True\n" in done.stdout


def test_after_an_error_of_the_notebooks_own_debug_is_ipythons(notebook: Kernel) -> None:
    notebook.run("def f(own):\n    raise ValueError\nf(own='notebook')")
    done = notebook.run("%debug", answers=["p own", "q"], timeout_s=BOUND_S)
    assert done.prompts[0] == "ipdb> "
    assert "'notebook'" in done.stdout


def test_breakpoint(notebook: Kernel) -> None:
    code = (
        "%%distributed\ndef f(x):\n    if rank: breakpoint()\n    return x * 2\n"
        "total = torch.tensor(f(rank + 1))\ndist.all_reduce(total)\nint(total)"
    )
    done = notebook.run(code, answers=["p x", "x = 50", "c"], timeout_s=BOUND_S)
    assert done.prompts == ["rank 1: ipdb> "] * 3
    assert done.stdout.endswith("[0-1] 102\n")
    # Stop is Stop again after `c`, and in the debugger.
    for answer in ("c", notebook.manager.interrupt_kernel):
        code = (
            "%%distributed\nimport pdb\nif rank: pdb.set_trace()\nprint('on', flush=True)\nwhile True: pass"
        )
        stop = notebook.manager.interrupt_kernel
        done = notebook.run(
            code, answers=[answer], meanwhile=stop if answer == "c" else None, timeout_s=BOUND_S
        )
        assert "the cell was stopped" in done.error
        assert notebook.run(SUM).stdout == "[0-1] 2\n"


def test_leaving_a_breakpoint_with_q_ends_the_cell(notebook: Kernel) -> None:
    done = notebook.run(
        "%%distributed\nif rank: breakpoint()\ndist.barrier()", answers=["q"], timeout_s=BOUND_S
    )
    assert "left with q" in done.error
    assert notebook.run(SUM).stdout == "[0-1] 2\n"


def test_what_a_failure_keeps_goes_with_the_next_cell(notebook: Kernel) -> None:
    code = (
        "%%distributed\nimport weakref\nseen = []\n"
        "def f():\n    held = torch.ones(10)\n    seen.append(weakref.ref(held))\n    raise ValueError\nf()"
    )
    notebook.run(code, timeout_s=BOUND_S)
    assert notebook.run("%nbgpu debug", answers=["p held.sum()", "q"], timeout_s=BOUND_S).stdout.count(
        "tensor(10.)"
    )
    assert notebook.run("%distributed seen[0]()").stdout == ""


def test_what_only_a_failed_function_holds_is_not_asked_for_again(notebook: Kernel) -> None:
    code = (
        "%%distributed\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "kept = [DDP(torch.nn.Linear(2, 2))]\n"
        "def train(fails):\n    ddp = DDP(torch.nn.Linear(2, 2))\n    ddp(torch.ones(1, 2)).sum().backward()\n"
        "    if fails: raise ValueError\ntrain(rank == 1)"
    )
    done = notebook.run(code, timeout_s=BOUND_S)
    assert "ValueError" in done.error
    assert "make it again" not in done.stderr
    done = notebook.run("%nbgpu debug", answers=["p type(ddp)", "q"], timeout_s=BOUND_S)
    assert "DistributedDataParallel'>" in done.stdout, done
    code = "%%distributed\nkept[0](torch.ones(1, 2) * rank).sum().backward()\nkept[0].module.weight.grad[0, 0].item()"
    assert notebook.run(code, timeout_s=BOUND_S).stdout == "[0-1] 0.5\n"
