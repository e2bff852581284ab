"""A rank that dies is named with its signal and replaced; the others keep all that they have.

Each test begins with what the one before it left: ranks that were replaced are ranks like all others.
"""

from __future__ import annotations

import ast
import os
import signal
import time
from collections.abc import Iterator

import faults
import pytest
from kernel import Kernel
from rows import Measured, row

BOUND_S = 60
TRAIN = """
torch.manual_seed(rank)
model = torch.nn.Linear(8, 1)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
def train(num_steps):
    for step in range(num_steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
train(5)
"""
FINGERPRINT = """
moments = [value for state in optimizer.state.values() for value in state.values()]
state = [value.double().sum().item() for value in [*model.parameters(), *moments]]
state += [optimizer.param_groups[0][name] for name in ("lr", "betas", "weight_decay")]
everybody = [None] * world_size
dist.all_gather_object(everybody, state)
everybody[0] == everybody[1]
"""


pytestmark = pytest.mark.usefixtures("ranks_may_be_replaced")


@pytest.fixture(autouse=True)
def the_sum_is_right_afterwards(notebook: Kernel) -> Iterator[None]:
    yield
    done = notebook.run(
        "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)", timeout_s=BOUND_S
    )
    assert done.stdout == "[0-1] 2\n", done.stderr


@row(
    "a rank is ended by {signal_name}, in a cell",
    "the rank is named with its signal, at once",
    bound_s=0.5,
)
@pytest.mark.parametrize(
    ("action", "signal_name"),
    [("kill", "SIGKILL"), ("terminate", "SIGTERM"), ("segfault", "SIGSEGV"), ("abort", "SIGABRT")],
)
def test_a_rank_that_dies_is_named_with_its_signal(
    notebook: Kernel, measured: Measured, action: faults.Action, signal_name: str
) -> None:
    notebook.run("%%distributed\nkept = 5")
    done = notebook.run(
        f"%%distributed\n{faults.at(1, action)}\ndist.barrier()", meanwhile=measured.ended, timeout_s=BOUND_S
    )
    assert done.stderr.startswith(f"rank 1 was killed by {signal_name}")
    assert f"rank 1 was killed by {signal_name}" in done.error
    assert "rank 1 was replaced and is empty; rank 0 kept all variables" in done.stderr
    assert notebook.run("%pull kept --rank 0\nkept").value == "5"
    assert "on rank 1:" in (lost := notebook.run("%distributed kept").error)
    assert "NameError" in lost


# What a test of these sets, the process that has it keeps: the new one knows nothing of it.
DEFAULTS = {
    "set_default_dtype(torch.float64)": "torch.set_default_dtype(torch.float32)",
    "set_default_dtype(torch.float16)": "torch.set_default_dtype(torch.float32)",
    "set_default_device('meta')": "torch.set_default_device(None)",
}


@row(
    "a rank is killed, or raises while the others wait, after torch.{default}",
    "the group is formed again, once; the rank is replaced and the sum is right; the others keep the setting",
    bound_s=6,
)
@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("default", DEFAULTS)
def test_the_group_is_formed_again_whatever_torch_s_defaults_are(
    notebook: Kernel, measured: Measured, default: str, action: faults.Action
) -> None:
    notebook.run(f"%%distributed\nkept = 5\ntorch.{default}")
    done = notebook.run(
        f"%%distributed\n{faults.at(1, action)}\ndist.barrier()", meanwhile=measured.ended, timeout_s=BOUND_S
    )
    if action == "raise":
        measured.ended(done.error)
    now = notebook.run("%%distributed --ranks 0\n(torch.ones(1).dtype, torch.ones(1).device.type), kept")
    notebook.run(f"%%distributed\n{DEFAULTS[default]}")
    assert ("ValueError: on purpose" if action == "raise" else "rank 1 was killed by SIGKILL") in done.error
    assert done.stderr.count("was killed by") == (action == "kill")
    dtype = "float32" if "device" in default else default.removeprefix("set_default_dtype(torch.")[:-1]
    device = "meta" if "device" in default else "cpu"
    assert now.stdout == f"[0] ((torch.{dtype}, '{device}'), 5)\n", now.error + now.stderr


def test_a_death_is_seen_while_the_engines_parent_is_busy(notebook: Kernel) -> None:
    """It imports what training needs when a run begins; until it asks how its child ended the child is a
    zombie."""
    parent = notebook.run("import nbgpu, psutil\npsutil.Process(nbgpu.current().pids[0]).ppid()").value
    done = notebook.run(
        f"%%distributed\nprint(rank, flush=True)\n{faults.at(1, 'kill')}\ndist.barrier()",
        meanwhile=lambda: faults.busy_for(int(parent), 4),
        timeout_s=BOUND_S,
    )
    assert "rank 1 was killed by SIGKILL" in done.error
    assert "rank 1 was replaced and is empty; rank 0 kept all variables" in done.stderr


@row(
    "a rank is killed in a cell, and replaced",
    "ranks keep their numbers, the others their variables; its cells can be run again there",
    bound_s=6,
)
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_died_runs_its_cells_again(notebook: Kernel, measured: Measured, dies: int) -> None:
    notebook.run("%%distributed\nkept = 5 + rank")
    notebook.run(f"%%distributed\n{TRAIN}")
    notebook.run("sent = 4\n%push sent")
    notebook.run(f"%%distributed\n{faults.at(dies, 'raise')}")
    done = notebook.run(f"%%distributed\n{faults.at(dies, 'kill')}\ntrain(10**6)", timeout_s=BOUND_S)
    measured.ended(done.error)
    assert f"rank {dies} was killed by SIGKILL" in done.error
    assert f"ddp, a DistributedDataParallel object that rank {dies} does not have" in done.stderr
    weights = notebook.run(f"%distributed model.weight.sum().item() if rank != {dies} else None").stdout
    # As a scheduler may do; the new rank's optimizer is made with the betas of TRAIN.
    notebook.run(f"%%distributed --ranks {1 - dies}\noptimizer.param_groups[0]['betas'] = (0.5, 0.75)")

    told = notebook.run(f"%nbgpu restart --rank {dies} --replay", timeout_s=BOUND_S)
    assert f"rank {dies} has a new process" in told.stdout, told.error
    assert "ValueError: on purpose" in told.stdout, "the cell that raised has raised again"
    assert "values that were pushed are missing there: %push sent" in told.stdout
    assert (
        f"the parameters of ddp differed between the ranks: all have those of rank {1 - dies} now"
        in told.stdout
    )
    assert notebook.run("%distributed kept").stdout == "[0] 5\n[1] 6\n"
    assert notebook.run("%distributed optimizer.param_groups[0]['betas']").stdout == "[0-1] (0.5, 0.75)\n"
    # The survivor's weights are what they were, the new rank has the same, and training goes on.
    assert (
        notebook.run(f"%distributed model.weight.sum().item() if rank != {dies} else None").stdout == weights
    )
    assert notebook.run(f"%%distributed\n{FINGERPRINT}").stdout == "[0-1] True\n"
    assert notebook.run(f"%%distributed\ntrain(3)\n{FINGERPRINT}").stdout == "[0-1] True\n"


def test_a_rank_that_dies_between_two_cells_is_told_before_the_next(notebook: Kernel) -> None:
    notebook.run("%%distributed\nkept = 5")
    pids = "nbgpu.client.cluster.cluster.current().pids"
    notebook.run(
        f"import nbgpu.client.cluster.cluster, os, signal, time\nos.kill({pids}[0], signal.SIGKILL); time.sleep(1)"
    )
    done = notebook.run("%distributed kept", timeout_s=BOUND_S)
    assert "rank 0 was killed by SIGKILL" in done.error
    assert "Nothing was run" in done.error
    assert notebook.run("%%distributed --ranks 1\nkept").stdout == "[1] 5\n"


@row(
    "a rank that waits in a collective is ended by SIGTERM from outside",
    "the rank is named with its signal, in the cell at hand",
    bound_s=0.5,
)
def test_a_rank_that_waits_is_ended_by_sigterm_in_the_cell_at_hand(
    notebook: Kernel, measured: Measured
) -> None:
    pid = int(notebook.run("import nbgpu\nnbgpu.current().pids[1]").value)

    def terminate() -> None:
        time.sleep(1)  # until the rank is in the collective
        measured.fault_now()
        os.kill(pid, signal.SIGTERM)

    done = notebook.run(
        "%%distributed\nif rank == 0: print('waiting', flush=True); import time; time.sleep(600)\ndist.barrier()",
        meanwhile=terminate,
        timeout_s=BOUND_S,
    )
    measured.ended(done.error)
    assert "rank 1 was killed by SIGTERM" in done.error
    assert "SIGUSR1" not in done.stderr + done.error


@pytest.mark.parametrize(
    ("killed", "told"), [([0, 1], "no rank keeps its variables"), ([1], "rank 0 keeps its variables")]
)
def test_a_stop_says_who_keeps_their_variables(notebook: Kernel, killed: list[int], told: str) -> None:
    pids = ast.literal_eval(notebook.run("import nbgpu\nnbgpu.current().pids").value)

    def kill_and_stop() -> None:
        # The kernel sees both at once.
        os.kill(notebook.manager.provisioner.pid, signal.SIGSTOP)
        for rank in killed:
            os.kill(pids[rank], signal.SIGKILL)
        notebook.manager.interrupt_kernel()
        os.kill(notebook.manager.provisioner.pid, signal.SIGCONT)

    # A cell that is not awaited is interrupted in its waiting, before it can look at the ranks.
    code = "%distributed print('working', flush=True) or [time.sleep(0.01) for _ in range(10**5)]"
    notebook.run("%%distributed\nimport time")
    done = notebook.run(code, meanwhile=kill_and_stop, timeout_s=BOUND_S)
    assert f"the cell was stopped; {told}" in done.error
    assert "the ranks keep" not in done.error


def test_a_rank_that_is_stuck_can_be_given_up(notebook: Kernel) -> None:
    notebook.run("%%distributed\nkept = 5")

    def stop() -> None:
        time.sleep(1)  # until the rank is in C
        notebook.manager.interrupt_kernel()

    code = f"%%distributed\nprint('working', flush=True)\n{faults.at(1, 'hold_gil_for_ever')}"
    done = notebook.run(code, meanwhile=stop, timeout_s=BOUND_S)
    assert "%nbgpu restart --rank 1" in done.error
    assert "rank 1 has a new process" in notebook.run("%nbgpu restart --rank 1", timeout_s=BOUND_S).stdout
    assert notebook.run("%%distributed --ranks 0\nkept").stdout == "[0] 5\n"


@row(
    "all ranks are killed between two cells",
    "one cell fails, which names all of them and says that nothing was kept",
    bound_s=6,
)
@pytest.mark.parametrize("apart_s", [0, 0.05])
def test_all_ranks_are_killed_between_two_cells(notebook: Kernel, measured: Measured, apart_s: float) -> None:
    pids = ast.literal_eval(notebook.run("import nbgpu\nnbgpu.current().pids").value)
    notebook.run("%%distributed\nkept = 1")
    measured.fault_now()
    for pid in (pids[0], pids[1]):
        os.kill(pid, signal.SIGKILL)
        time.sleep(apart_s)
    done = notebook.run("%%distributed\n1", timeout_s=BOUND_S)
    measured.ended(done.error)
    assert all(f"rank {rank} was killed by SIGKILL" in done.error for rank in (0, 1))
    # A cell that begins before the processes have ended says below its output what was lost.
    lost = "ranks 0-1 were replaced and are empty; no rank kept its variables"
    assert lost in done.error + done.stderr
    assert notebook.run("%%distributed\n'kept' in globals()").said(0, 1) == [["False"]] * 2


@row(
    "gloo aborts the ranks, because their tensors differ in size",
    "the ranks that it killed are named and replaced",
    bound_s=6,
)
def test_a_size_that_differs_between_the_ranks(notebook: Kernel, measured: Measured) -> None:
    done = notebook.run(
        f"%%distributed\n{faults.note()}\ndist.all_reduce(torch.ones(4 if rank else 4 * 10**6))",
        timeout_s=BOUND_S,
    )
    measured.ended(done.error)
    assert done.status == "error"


def test_cells_that_ended_the_group_run_again_on_a_rank_that_is_replaced(notebook: Kernel) -> None:
    notebook.run("%%distributed\nseen = [dist.get_rank()]; dist.destroy_process_group()")
    notebook.run("%%distributed\nboth = dist.new_group([0, 1]); seen.append(dist.get_rank(both))")
    done = notebook.run("%nbgpu restart --rank 1 --replay")
    assert done.status == "ok"
    assert "not been initialized" not in done.stdout
    assert notebook.run("%%distributed --ranks 1\nseen").said(1) == [["[1, 1]"]]
