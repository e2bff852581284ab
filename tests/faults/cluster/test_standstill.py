"""A rank that stands still, because something has stopped its process, is waited for and taken back when it
goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faults
import psutil
import pytest
import warm_start
from kernel import Done, Kernel
from rows import Measured, row

BOUND_S = 90
LONG_S = 5.0
"""Longer than any heartbeat is waited for."""
SUM = "%%distributed\ntotal = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
RIGHT = "[0] 2 5\n[1] 2 6\n"


pytestmark = pytest.mark.usefixtures("ranks_may_be_replaced")


@pytest.fixture(autouse=True)
def the_sum_is_right_before_and_afterwards(notebook: Kernel) -> Iterator[None]:
    assert notebook.run("%%distributed\nkept = 5 + rank", timeout_s=BOUND_S).status == "ok"
    yield
    done = notebook.run(SUM, timeout_s=BOUND_S)
    assert done.stdout == RIGHT, done.error


def pid_of(notebook: Kernel, rank: int) -> int:
    return int(notebook.run(f"import nbgpu\nnbgpu.current().pids[{rank}]").value)


@contextmanager
def stopped(*pids: int) -> Iterator[Callable[[], None]]:
    """Processes that stand still meanwhile, or until what it gives is called."""

    def go_on() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield go_on
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def later(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def interrupt(notebook: Kernel) -> None:
    """As the stop button does; from any thread."""
    os.kill(notebook.manager.provisioner.pid, signal.SIGINT)


def notices(done: Done) -> list[str]:
    return [data["text/plain"] for data in [*done.displays, *done.updates] if "text/html" in data]


def why(pid: int) -> str:
    return f"rank 1 does not answer: its process is stopped (SIGSTOP; a debugger?). kill -CONT {pid} lets it go on"


@row(
    "a rank is stopped by SIGSTOP for 5 s, in a cell",
    "a notice says so, and how it goes on; the cell ends as if nothing had been",
    bound_s=None,
)
@pytest.mark.parametrize(
    "what", ["total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)", "print(2, kept)"]
)
def test_a_cell_waits_for_a_rank_that_stands_still(notebook: Kernel, what: str) -> None:
    pid = pid_of(notebook, 1)
    with stopped(pid) as go_on, later(LONG_S, go_on):
        done = notebook.run(f"%%distributed\n{what}", timeout_s=BOUND_S)
    assert (done.status, done.stdout, done.stderr) == ("ok", RIGHT, ""), done.error
    shown = notices(done)
    assert any(why(pid) in text for text in shown), shown
    assert shown[-1] == ""


@row(
    "Stop while a rank stands still",
    "the notebook is back; the rank, how it goes on and how to give it up are named; when it goes on, the next cell is right",
    bound_s=2,
)
@pytest.mark.parametrize("what", ["dist.barrier()", "import time\nfor _ in range(10**6): time.sleep(0.01)"])
def test_stop_does_not_wait_for_a_rank_that_stands_still(
    notebook: Kernel, measured: Measured, what: str
) -> None:
    def stop() -> None:
        measured.fault_now()
        interrupt(notebook)

    pid = pid_of(notebook, 1)
    with stopped(pid):
        with later(1.5, stop):
            done = notebook.run(f"%%distributed\n{what}", timeout_s=BOUND_S)
        measured.ended(done.error)
        assert why(pid).removeprefix("rank 1 ") in done.error
        assert "%nbgpu restart --rank 1" in done.error
        assert "Code in C" not in done.error
        refused = notebook.run(SUM)
        assert why(pid) in refused.error
        assert why(pid).removeprefix("rank 1 ") in notebook.run("%nbgpu status").stdout


@row(
    "a rank is stopped by SIGSTOP in the middle of a large all_reduce, and Stop",
    "no rank loses a variable; when the rank goes on, the next cell is right",
    bound_s=None,
)
def test_a_transfer_that_is_cut_in_the_middle_costs_no_variables(notebook: Kernel) -> None:
    """The ranks do not wait for it, so that only threads of the process group do."""
    pid = pid_of(notebook, 1)
    send = (
        "%%distributed\nimport os, signal, threading, time\nwork = dist.all_reduce(torch.ones(2**26), async_op=True)\n"
        "if rank == 1: time.sleep(0.15); os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)"
    )
    with later(3, lambda: interrupt(notebook)):
        done = notebook.run(send, timeout_s=BOUND_S)
    os.kill(pid, signal.SIGCONT)
    assert why(pid).removeprefix("rank 1 ") in done.error
    for _ in range(2):
        done = notebook.run(SUM, timeout_s=BOUND_S)
        assert done.stdout == RIGHT, done.error


def test_a_rank_that_stands_still_can_be_given_up(notebook: Kernel) -> None:
    pid = pid_of(notebook, 1)
    with stopped(pid):
        told = notebook.run("%nbgpu restart --rank 1", timeout_s=BOUND_S).stdout
    assert "rank 1 has a new process" in told
    assert notebook.run("%%distributed --ranks 0\nkept").stdout == "[0] 5\n"
    assert notebook.run("%%distributed --ranks 1\nkept = 6").status == "ok"


def test_a_rank_that_is_killed_while_it_stands_still_is_replaced(notebook: Kernel) -> None:
    pid = pid_of(notebook, 1)
    with stopped(pid), later(LONG_S, lambda: os.kill(pid, signal.SIGKILL)):
        done = notebook.run("%%distributed\ndist.barrier()", timeout_s=BOUND_S)
    assert "rank 1 was killed by SIGKILL" in done.error
    assert "rank 0 kept all variables" in done.stderr
    assert notebook.run("%%distributed --ranks 1\nkept = 6").status == "ok"


def test_whoever_asks_for_a_variable_is_told_of_a_rank_that_stands_still(notebook: Kernel) -> None:
    pid = pid_of(notebook, 1)
    with stopped(pid) as go_on, later(LONG_S, go_on):
        done = notebook.run("%pull kept --rank 1\nkept", timeout_s=BOUND_S)
    assert done.value == "6", done.error
    assert notices(done) == [why(pid), ""]
    with stopped(pid), later(2, lambda: interrupt(notebook)):
        done = notebook.run("%pull kept --rank 1", timeout_s=BOUND_S)
    assert "KeyboardInterrupt" in done.error


@pytest.mark.long
@row(
    "the whole machine stands still for 5 s: kernel, controller, engines",
    "nothing is lost, and the cell goes on",
    bound_s=None,
)
def test_a_host_that_sleeps_loses_no_engine(notebook: Kernel) -> None:
    family = warm_start.family_of(notebook.manager.provisioner.pid)
    assert {pid_of(notebook, rank) for rank in (0, 1)} < family

    def sleep() -> None:
        with stopped(*family):
            time.sleep(LONG_S)

    code = "%%distributed\nimport time\nfor _ in range(80): dist.barrier(); time.sleep(0.1)"
    with later(1.5, sleep):
        done = notebook.run(code, timeout_s=BOUND_S)
    assert (done.status, done.stderr) == ("ok", ""), done.error


def test_engines_outlive_a_controller_that_stands_still(notebook: Kernel) -> None:
    controller = int(
        notebook.run("nbgpu.current().parts.state.pool.processes.leaders['controller'].pid").value
    )
    family = [controller, *(child.pid for child in psutil.Process(controller).children(recursive=True))]
    with stopped(*family) as go_on, later(LONG_S, go_on):
        done = notebook.run(SUM, timeout_s=BOUND_S)
    assert done.stdout == RIGHT, done.error


# ---- in training ----


def begin_run(notebook: Kernel, runs_dir: Path, **settings: Any) -> None:
    every = {**faults.ENDLESS, "threads": 1, "runs_dir": str(runs_dir), **settings}
    code = f"import nbgpu, time\nrun = nbgpu.current().train('autoencoder', **{every!r})"
    assert notebook.run(f"{code}\n{past(2)}", timeout_s=BOUND_S).status == "ok"


def past(num_steps: int) -> str:
    """Code that waits until the run has gone on so far, or is over."""
    return (
        f"until = max(s.step for s in run.statuses()) + {num_steps}\n"
        "while max(s.step for s in run.statuses()) < until and not run.over: time.sleep(0.05)"
    )


@contextmanager
def run_in_which_rank_1_is_stopped(notebook: Kernel, runs_dir: Path) -> Iterator[int]:
    """Begins a run and stops the process of rank 1, whose pid it gives; the process goes on at the end."""
    begin_run(notebook, runs_dir)
    pid = pid_of(notebook, 1)
    with stopped(pid):
        yield pid


@pytest.mark.long
@row(
    "a rank is stopped by SIGSTOP for 5 s, in a step of a run",
    "the run waits, and says for which rank; it goes on when the rank does, and nothing has to be mended",
    bound_s=None,
)
def test_a_run_waits_for_a_rank_that_stands_still(notebook: Kernel, tmp_path: Path) -> None:
    with run_in_which_rank_1_is_stopped(notebook, tmp_path) as pid:
        done = notebook.run("while not run.hang: time.sleep(0.05)\nprint(run.hang)", timeout_s=BOUND_S)
        time.sleep(LONG_S)
    pattern = rf"rank 0 waits in .*, for \d+ s; {re.escape(why(pid))}\n"
    assert re.fullmatch(pattern, done.stdout) or done.stdout == f"{why(pid)}\n", done.stdout
    done = notebook.run(f"{past(3)}\nrun.stop()\nrun.wait(400).status, run.hang", timeout_s=BOUND_S)
    assert done.value == "('stopped', '')", done.error
    assert "heal" not in (next(tmp_path.iterdir()) / "rank0.jsonl").read_text()


@pytest.mark.long
@row(
    "Stop of a run in which a rank stands still",
    "it ends; the rank, how it goes on and how to give it up are named; when it goes on, the next cell and run are right",
    bound_s=None,
)
def test_stop_ends_a_run_in_which_a_rank_stands_still(notebook: Kernel, tmp_path: Path) -> None:
    with run_in_which_rank_1_is_stopped(notebook, tmp_path) as pid:
        done = notebook.run("run.stop()\nrun.wait(400)", timeout_s=BOUND_S)
        assert why(pid) in done.error
        assert "%nbgpu restart --rank 1" in done.error
        assert "Code in C" not in done.error
    done = notebook.run(SUM, timeout_s=BOUND_S)
    assert done.stdout == RIGHT, done.error
    begin_run(notebook, tmp_path, steps=3)
    assert notebook.run("run.wait(400).status", timeout_s=BOUND_S).value == "'finished'"


@row(
    "a rank that stands still in a run is given up with %nbgpu restart --rank",
    "it is replaced, and training goes on",
    bound_s=6,
)
def test_a_rank_that_stands_still_in_a_run_can_be_given_up(
    notebook: Kernel, measured: Measured, tmp_path: Path
) -> None:
    with run_in_which_rank_1_is_stopped(notebook, tmp_path):
        notebook.run("while not run.hang: time.sleep(0.05)", timeout_s=BOUND_S)
        measured.fault_now()
        done = notebook.run("%nbgpu restart --rank 1", timeout_s=BOUND_S)
    assert "rank 1 stood still and was ended" in done.stdout, done.error
    done = notebook.run(past(1), timeout_s=BOUND_S)
    measured.ended()
    done = notebook.run("run.stop()\nrun.wait(400).status", timeout_s=BOUND_S)
    assert done.value == "'stopped'", done.error
    recorded = (next(tmp_path.iterdir()) / "rank0.jsonl").read_text()
    assert "rank 1 stood still and was ended by a restart." in recorded
    assert "OOM" not in recorded
    assert notebook.run("%%distributed --ranks 1\nkept = 6").status == "ok"


def test_a_run_that_goes_on_is_not_restarted(notebook: Kernel, tmp_path: Path) -> None:
    begin_run(notebook, tmp_path)
    assert "the ranks are training" in notebook.run("%nbgpu restart --rank 1").error
    assert notebook.run("run.stop()\nrun.wait(400).status", timeout_s=BOUND_S).value == "'stopped'"
