"""A Stop in the midst of a start, a stop or a replacement leaves no process and no folder that belongs to
nobody."""

from __future__ import annotations

import ast
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import launching
import leaks
import psutil
import pytest
from kernel import Done, Kernel, kernel
from rows import row

# A process is interrupted as it is launched, and who is left of a kernel's family is looked at.
pytestmark = pytest.mark.cold

BOUND_S = 60
SETTLED_S = 5
STARTS = f"%nbgpu start {launching.flags()}"
SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"
HELD = """
import gc, os, threading
gc.collect()
len(os.listdir('/proc/self/fd')), len(threading.enumerate())
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        started.run("%load_ext nbgpu")
        # What a start leaves once, such as modules with descriptors of their own, is no leak.
        assert started.run(STARTS).status == "ok"
        started.run(SUM)
        assert started.run("%nbgpu stop").status == "ok"
        with leaks.holding_family_of(started.manager.provisioner.pid):
            yield started


@pytest.fixture
def running(notebook: Kernel) -> Iterator[Kernel]:
    assert notebook.run(STARTS).status == "ok"
    yield notebook
    notebook.run("%nbgpu stop")


def run_and_stop(notebook: Kernel, code: str, after_s: float) -> Done:
    """Runs a cell and presses Stop, which may come when the cell is over already."""
    # Another thread would leave an event loop of jupyter_client's.
    stop = threading.Timer(after_s, os.killpg, (os.getpgid(notebook.manager.provisioner.pid), signal.SIGINT))
    stop.start()
    try:
        return notebook.run(code, timeout_s=BOUND_S)
    finally:
        stop.join()


def family(notebook: Kernel) -> list[psutil.Process]:
    """What the kernel has started, directly or not, and has not ended."""
    started = psutil.Process(notebook.manager.provisioner.pid).children(recursive=True)
    return [process for process in started if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def nothing_is_left(notebook: Kernel) -> None:
    assert family(notebook) == []
    assert [p for p in Path(tempfile.gettempdir()).iterdir() if re.fullmatch("nbgpu-[0-9a-f]+", p.name)] == []


def has_as_many_processes(notebook: Kernel, num: int) -> None:
    give_up_s = time.monotonic() + BOUND_S
    while len(family(notebook)) != num:
        assert time.monotonic() < give_up_s, family(notebook)
        time.sleep(0.05)


def sum_is_right(notebook: Kernel) -> None:
    """In the first cell, or in the one after it where the first says that a rank was replaced before."""
    done = notebook.run(SUM, timeout_s=BOUND_S)
    if done.status == "error":
        assert "Nothing was run: run it again" in done.error, done.error
        assert "killed by" not in done.error, "it was ended for the replacement"
        done = notebook.run(SUM, timeout_s=BOUND_S)
    assert done.stdout == "[0-1] 2\n", done.stderr + done.error


def _held(notebook: Kernel, at_most: tuple[int, int] | None) -> tuple[int, int]:
    """How many descriptors and threads the kernel has, once it has not more than before: some end in a moment
    by themselves. One descriptor more may be of the file that IPython keeps the history in, which another
    thread of it writes."""
    give_up_s = time.monotonic() + SETTLED_S
    while True:
        fds, threads = ast.literal_eval(notebook.run(HELD).value)
        is_settled = at_most is None or (fds <= at_most[0] + 1 and threads <= at_most[1])
        if is_settled or time.monotonic() > give_up_s:
            return fds, threads
        time.sleep(0.2)


@pytest.mark.long
def test_a_start_and_a_stop_leave_neither_descriptors_nor_threads(notebook: Kernel) -> None:
    held = []
    for _ in range(3):
        assert notebook.run(STARTS).status == "ok"
        notebook.run(SUM)
        assert notebook.run("%nbgpu stop").status == "ok"
        held.append(_held(notebook, at_most=held[0] if held else None))
    assert max(fds for fds, _ in held) <= held[0][0] + 1, held
    assert max(threads for _, threads in held) <= held[0][1], held


@row(
    "Stop while a cluster starts", "no process and no folder is left, and the next start works", bound_s=None
)
@pytest.mark.parametrize("after_s", [0.05, 0.3, 1.0])
def test_a_stop_while_a_cluster_starts(notebook: Kernel, after_s: float) -> None:
    done = run_and_stop(notebook, STARTS, after_s)
    if done.status == "ok":
        notebook.run("%nbgpu stop")
    assert done.status == "ok" or "KeyboardInterrupt" in done.error
    nothing_is_left(notebook)


INTERRUPTED = """
import os, signal, subprocess
Popen = subprocess.Popen
def interrupted(command, *args, **options):
    child = Popen(command, *args, **options)
    if 'nbgpu.client.engines.controller' in command:
        os.kill(child.pid, signal.SIGINT)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        signal.raise_signal(signal.SIGINT)
    return child
subprocess.Popen = interrupted
"""


def test_a_stop_that_ends_a_process_before_it_has_a_session_of_its_own(notebook: Kernel) -> None:
    notebook.run(INTERRUPTED)
    done = notebook.run(STARTS)
    notebook.run("subprocess.Popen = Popen")
    assert "KeyboardInterrupt" in done.error
    nothing_is_left(notebook)


@row("Stop while a cluster stops", "it stops all the same: no process and no folder is left", bound_s=None)
def test_a_stop_while_a_cluster_stops(running: Kernel) -> None:
    run_and_stop(running, "%nbgpu stop", 0.05)
    nothing_is_left(running)


@pytest.mark.long
@row(
    "Stop while a rank is replaced",
    "the next cell names the rank whose variables are lost, the sum is right, no process is left over",
    bound_s=None,
)
@pytest.mark.parametrize(
    "code",
    [
        "%nbgpu restart --rank 1",
        "%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGTERM)\ndist.barrier()",
    ],
    ids=["restart", "replacement"],
)
def test_a_stop_while_a_rank_is_replaced(running: Kernel, code: str) -> None:
    sum_is_right(running)
    num = len(family(running))
    for after_s in (0.02, 0.1, 0.2, 0.4):
        run_and_stop(running, code, after_s)
        sum_is_right(running)
        has_as_many_processes(running, num)


DALLIES = """
import time
from torch.distributed import Store, distributed_c10d
make = distributed_c10d.ProcessGroupGloo

class Dallying(Store):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        time.sleep(2)
        return self.store.get(key)

    def wait(self, keys, *timeout):
        time.sleep(2)
        self.store.wait(keys, *timeout)

    def has_extended_api(self):
        return False

def make_dallying(store, rank, size, timeout):
    distributed_c10d.ProcessGroupGloo = make
    return make(Dallying(store), rank, size, timeout=timeout)

if rank == 1:
    distributed_c10d.ProcessGroupGloo = make_dallying
"""
"""Once, one rank announces itself to the others, and looks for them so late that a Stop comes while they wait
for it."""


@pytest.mark.long
@row(
    "Stop while the process group is formed, and one rank has not connected to the others",
    "the next cell forms it: the sum is right, variables are kept",
    bound_s=None,
)
def test_a_stop_while_ranks_connect(notebook: Kernel) -> None:
    """gloo decides by chance who of two ranks waits for the other. With four ranks three times in four one
    waits for rank 1."""
    assert notebook.run(f"%nbgpu start {launching.flags(4)}").status == "ok"
    try:
        assert notebook.run(f"%%distributed\nkept = 5 + rank\n{DALLIES}").status == "ok"
        done = run_and_stop(notebook, "import nbgpu\nnbgpu.current().ranks.regroup()", 1)
        assert "KeyboardInterrupt" in done.error
        again = notebook.run(f"{SUM}, kept", timeout_s=BOUND_S)
        assert again.stdout == "".join(f"[{rank}] (4, {5 + rank})\n" for rank in range(4)), again.error
    finally:
        notebook.run("%nbgpu stop")


@row(
    "code on a rank closes descriptors that are not its own",
    "its own rank ends and is replaced; the other keeps its variables, the sum is right",
    bound_s=None,
)
def test_code_that_closes_all_descriptors_ends_its_own_rank_only(running: Kernel) -> None:
    running.run("%%distributed\nkept = 5 + rank")
    folder = Path(
        running.run("import nbgpu\nstr(nbgpu.current().parts.state.connection_file)").value.strip("'")
    )
    done = running.run("%%distributed\nimport os\nif rank == 1: os.closerange(3, 40)", timeout_s=BOUND_S)
    time.sleep(1)  # the rank may notice it only after its answer
    again = running.run(SUM, timeout_s=BOUND_S)
    if again.status == "error":
        again = running.run(SUM, timeout_s=BOUND_S)
    assert again.stdout == "[0-1] 2\n", done.error + again.error
    assert folder.exists()
    assert running.run("%%distributed --ranks 0\nkept").stdout == "[0] 5\n"
