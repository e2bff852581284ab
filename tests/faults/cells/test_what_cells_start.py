"""What a cell starts lives on between cells, and ends with its rank or with the cluster, however that
ends."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from rows import Measured, row

import nbgpu

BOUND_S = 30
STARTS = """
import multiprocessing, multiprocessing.util, os, subprocess, sys, time
def started():
    detaches = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    fork = multiprocessing.get_context("fork")
    global kept
    kept = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True),
        subprocess.run("sleep 600 &", shell=True),
        subprocess.Popen([sys.executable, "-c", detaches]).wait(),
        subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600; sleep 600"]),
        fork.Process(target=time.sleep, args=(600,)),
    ]
    kept[-1].start()
    multiprocessing.util.get_temp_dir()
started()
"""
NUM_STARTED = 6
"""By each rank; the shell that cannot be asked to end has a child of its own."""


def below(pid: int) -> list[psutil.Process]:
    """The processes that a rank has started, once all are there."""
    give_up_s = time.monotonic() + BOUND_S
    while len(found := alive(psutil.Process(pid).children(recursive=True))) < NUM_STARTED + 1:
        assert time.monotonic() < give_up_s, found
        time.sleep(0.05)
    return found


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that run; a zombie has ended."""
    return [p for p in processes if p.is_running() and _status(p) not in ("gone", psutil.STATUS_ZOMBIE)]


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"


def wait_for_the_end_of(processes: Sequence[psutil.Process]) -> None:
    give_up_s = time.monotonic() + BOUND_S
    while left := alive(processes):
        assert time.monotonic() < give_up_s, left
        time.sleep(0.01)


def test_a_pool_that_is_forked_ends_and_so_does_a_process_that_is_terminated(cluster2: Any) -> None:
    printed = cluster2.execute("""
import multiprocessing, time
fork = multiprocessing.get_context("fork")
for _ in range(10):
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
process = fork.Process(target=time.sleep, args=(600,))
process.start()
process.terminate()
process.join(30)
print(process.exitcode)
""")
    assert printed == {0: "-15\n", 1: "-15\n"}


def test_a_forked_child_has_none_of_the_ranks_signals(cluster2: Any) -> None:
    """A signal's number went through the rank's own descriptor: one to a child would have cut the rank
    off."""
    printed = cluster2.execute("""
import os, signal, time
def end_of_child(number):
    ready, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, b".")
            # A signal just before one long sleep would be noticed only after it.
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            os._exit(3)
        finally:
            os._exit(4)
    os.read(ready, 1)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print([end_of_child(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)])
""")
    assert printed == dict.fromkeys(range(2), "[3, -15, -10, -12]\n")
    assert cluster2.execute("total = torch.ones(1); dist.all_reduce(total); print(int(total))")[0] == "2\n"


def test_what_a_rank_has_started_ends_with_it_and_the_others_go_on(cluster2: Any) -> None:
    cluster2.execute(STARTS)
    of_rank_0, of_rank_1 = below(cluster2.pids[0]), below(cluster2.pids[1])
    os.kill(cluster2.pids[1], signal.SIGKILL)
    wait_for_the_end_of(of_rank_1)
    with pytest.raises(nbgpu.ClusterError, match="rank 1 was killed by SIGKILL"):
        cluster2.execute("pass")
    assert alive(of_rank_0) == of_rank_0
    assert "rank 0 has a new process" in cluster2.restart(rank=0)
    wait_for_the_end_of(of_rank_0)


_OWNER = f"""
import sys, nbgpu
cluster = nbgpu.Cluster(gpus="none", keep=sys.argv[1] == "keep").start()
cluster.execute({STARTS!r})
print(cluster.pids, flush=True)
input()
cluster.stop()
print("stopped", flush=True)
input()
"""


def _owner(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OWNER, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _told(owner: subprocess.Popen[str]) -> str:
    assert owner.stdout is not None
    return owner.stdout.readline()


@pytest.mark.long
@row(
    "{what_ends} while programs run that cells have started",
    "they end too, also those that have detached themselves, and leave nothing",
    bound_s=2,
)
@pytest.mark.parametrize(
    "what_ends", ["the kernel is killed", "the fork server is killed", "the cluster is stopped"]
)
def test_what_cells_have_started_ends_with_the_cluster(what_ends: str, measured: Measured) -> None:
    with _owner("") as owner:
        pids = ast.literal_eval(_told(owner))
        started = [process for pid in pids.values() for process in below(pid)]
        parent = psutil.Process(pids[0]).ppid()
        measured.fault_now()
        if what_ends == "the cluster is stopped":
            owner.communicate("\n\n")
        else:
            os.kill(owner.pid if what_ends == "the kernel is killed" else parent, signal.SIGKILL)
        wait_for_the_end_of(started)
        measured.ended()
        if owner.poll() is None:
            owner.communicate("\n\n")


@pytest.mark.long
def test_what_cells_have_started_goes_on_with_a_kept_cluster() -> None:
    with _owner("keep") as owner:
        pids = ast.literal_eval(_told(owner))
        started = [process for pid in pids.values() for process in below(pid)]
        owner.kill()
    time.sleep(1)
    assert alive(started) == started
    subprocess.run([sys.executable, "-m", "nbgpu.cli", "stop", str(pids[0])], check=True, capture_output=True)
    wait_for_the_end_of(started)
