"""A Stop that comes while the notebook's thread has a lock in its hand leaves no lock taken, and freezes
nothing.

The locks of `threading.Condition` are shared with the thread that brings the ranks' answers. A
KeyboardInterrupt in the microsecond after one was taken would leave it taken for good, and no answer would
ever come again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import launching
import leaks
import pytest
from kernel import Kernel, kernel
from rows import row

BOUND_S = 40
"""No answer within 60 s is what a frozen thread looks like."""
MAX_TRIES = 8
SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"
SMALL = {"data": "phantoms", "num_phantoms": 8, "patch_size": 16, "steps": 3, "val_every": 0, "threads": 1}
TRAP = """
import signal, sys, threading
import nbgpu
enter, main = threading.Condition.__enter__, threading.get_ident()
trap = {"is_set": False, "num_taken": 0, "at": 0}

def is_nbgpus(frame):
    while frame is not None:
        path = frame.f_code.co_filename
        if "/nbgpu/" in path:
            return True
        if "/ipykernel/" in path or "/IPython/" in path:
            return False  # the kernel's own lock, for a print
        frame = frame.f_back
    return False

def enter_and_interrupt(condition):
    entered = enter(condition)
    here = threading.get_ident() == main
    if trap["is_set"] and here and is_nbgpus(sys._getframe(1)):
        trap["num_taken"] += 1
        if trap["num_taken"] == trap["at"]:
            signal.raise_signal(signal.SIGINT)
    return entered

threading.Condition.__enter__ = enter_and_interrupt
"""
IN_THE_TRAP = """
trap.update(is_set=True, num_taken=0, at={at})
try:
    {code}
finally:
    trap["is_set"] = False
    print(trap["num_taken"])
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started, leaks.holding_family_of(started.manager.provisioner.pid):
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        assert started.run(TRAP).status == "ok"
        yield started
        started.run("threading.Condition.__enter__ = enter\n%nbgpu stop")


@pytest.mark.long
@row(
    "Stop while the notebook's thread has a lock that another thread needs",
    "as at any other moment",
    bound_s=None,
)
@pytest.mark.parametrize(
    "code",
    [
        "get_ipython().run_line_magic('distributed', 'rank')",
        "nbgpu.current().execute('rank')",
        "nbgpu.current().apply(len, 'abc')",
        "nbgpu.current().pull('rank', ranks='all')",
        "get_ipython().run_line_magic('nbgpu', 'restart --rank 1')",
        f"nbgpu.current().train('autoencoder', runs_dir=folder, **{SMALL!r}).wait()",
    ],
    ids=["line", "execute", "apply", "pull", "restart", "wait"],
)
def test_a_stop_with_a_lock_taken(notebook: Kernel, code: str, tmp_path: Path) -> None:
    assert notebook.run(f"folder = {str(tmp_path)!r}").status == "ok"
    counted = notebook.run(IN_THE_TRAP.format(at=0, code=code), timeout_s=BOUND_S)
    assert counted.status == "ok", counted.error
    num_locks = ast.literal_eval(counted.stdout.splitlines()[-1])
    assert num_locks, "no lock was taken: the trap is not where it should be"
    for at in range(1, num_locks + 1, -(-num_locks // MAX_TRIES)):
        done = notebook.run(IN_THE_TRAP.format(at=at, code=code), timeout_s=BOUND_S)
        num_taken = ast.literal_eval(done.stdout.splitlines()[-1])
        # How often it looks for an answer is another number each time.
        assert "KeyboardInterrupt" in done.error or num_taken < at, f"at lock {at} of {num_locks}: {done}"
        # One that was stopped at its start is still about to end.
        notebook.run("if nbgpu.current().run: nbgpu.current().run.wait()", timeout_s=BOUND_S)
        again = notebook.run(SUM, timeout_s=BOUND_S)
        if "Nothing was run: run it again" in again.error:
            again = notebook.run(SUM, timeout_s=BOUND_S)
        assert again.stdout == "[0-1] 2\n", f"at lock {at} of {num_locks}: {again}"


IN_THE_HEAD_START = """
import signal, sys
from nbgpu.client.notebook import head_start
shell = get_ipython()
send_and_execute = shell.kernel.do_execute
steps = {"at": 0, "num": 0}

def interrupt(frame, event, argument):
    file = frame.f_code.co_filename
    is_within = "/nbgpu/" in file and frame.f_code.co_name != "send_and_execute"
    # First of all, signals.py begins to hold interrupts back.
    if event == "call" and is_within and (steps["num"] or not file.endswith("/signals.py")):
        steps["num"] += 1
        if steps["num"] == steps["at"]:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

async def traced(code, *arguments, **options):
    if code.startswith("%%distributed"):
        steps["num"] = 0
        sys.setprofile(interrupt)
    try:
        return await send_and_execute(code, *arguments, **options)
    finally:
        sys.setprofile(None)

shell.kernel.do_execute = traced
"""


@pytest.mark.long
def test_a_stop_while_a_cell_is_sent(notebook: Kernel) -> None:
    """The ranks have the cell while IPython is still about to run it. The notebook gets an answer all the
    same."""
    assert notebook.run(IN_THE_HEAD_START).status == "ok"
    try:
        assert notebook.run(SUM).stdout == "[0-1] 2\n"
        num_calls = int(notebook.run("steps['num']").value)
        for at in range(1, num_calls + 1, -(-num_calls // 40)):
            notebook.run(f"steps['at'] = {at}")
            done = notebook.run(f"{SUM}\n", timeout_s=BOUND_S)
            assert done.stdout == "[0-1] 2\n" or "Interrupt" in done.error, (
                f"at call {at} of {num_calls}: {done}"
            )
            notebook.run("steps['at'] = 0")
            again = notebook.run(SUM, timeout_s=BOUND_S)
            assert again.stdout == "[0-1] 2\n", f"at call {at} of {num_calls}: {again}"
    finally:
        notebook.run("shell.kernel.do_execute = send_and_execute")
