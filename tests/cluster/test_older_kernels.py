"""Clusters on a kernel without pidfds: deaths are seen, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import nbgpu
from nbgpu.client.host import registry

pytestmark = pytest.mark.cold

_OLDER_KERNEL = str(Path(__file__).parents[1] / "support" / "kernels" / "older_kernel.py")


@contextmanager
def _without_pidfds(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this code, and gets what its stdin is given."""
    command = [sys.executable, _OLDER_KERNEL, sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


_CELLS = """
import os, nbgpu, psutil
from nbgpu.machine.processes import has_pidfds
print(has_pidfds(), flush=True)
with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
    # A forked child has what its rank has open.
    printed = cluster.execute('''
import os, subprocess, time
if rank == 1:
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    if (child := os.fork()) == 0:
        os.setsid()
        time.sleep(600)
    print(child)
''')
    started = [psutil.Process(int(pid)) for pid in printed[1].split()]
    try:
        cluster.execute("if rank == 1: os.kill(os.getpid(), 9)\\ndist.barrier()")
    except nbgpu.RankError as error:
        print(str(error).splitlines()[0], flush=True)
    print(cluster.execute("total = torch.ones(1); dist.all_reduce(total); print(int(total))"), flush=True)
    print(len(psutil.wait_procs(started, timeout=30)[1]), flush=True)
opened = [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")]
print([path for path in opened if "alive-" in path], flush=True)
"""


def test_a_killed_rank_is_named_and_replaced_and_its_programs_end() -> None:
    with _without_pidfds(_CELLS) as owner:
        assert _line(owner) == "False", "the kernel has pidfds"
        assert "rank 1" in (told := _line(owner))
        assert "SIGKILL" in told
        assert _line(owner) == "{0: '2\\n', 1: '2\\n'}"
        assert _line(owner) == "0", "a program of the killed rank lives on"
        assert _line(owner) == "[]", "the kernel keeps the cluster's pipe open"
        assert owner.wait(400) == 0


_OWNER = """
import os, sys, time, nbgpu, psutil
cluster = nbgpu.Cluster(gpus="none", ranks=2{settings}).start()
processes = [p.pid for p in psutil.Process().children(recursive=True)]
child = os.fork()
if child == 0:
    os.setsid()  # it lives on, and has all descriptors that a fork inherits
    time.sleep(600)
print(child, *processes, flush=True)
time.sleep(600)
"""


@contextmanager
def _started(settings: str = "") -> Iterator[tuple[psutil.Process, list[psutil.Process]]]:
    """An owner, and the processes of its cluster. The owner has also forked a child that outlives it."""
    with _without_pidfds(_OWNER.format(settings=settings)) as owner:
        child, *others = map(int, _line(owner).split())
        try:
            yield psutil.Process(owner.pid), [psutil.Process(pid) for pid in others]
        finally:
            os.kill(child, signal.SIGKILL)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    give_up_s = time.monotonic() + 300
    while left := [process for process in processes if not _has_ended(process)]:
        assert time.monotonic() < give_up_s, f"these live on: {left}"
        time.sleep(0.05)


def _named(processes: list[psutil.Process], module: str) -> psutil.Process:
    return next(process for process in processes if module in " ".join(process.cmdline()))


@pytest.mark.parametrize(
    "who",
    [
        lambda owner, _: owner,
        pytest.param(lambda _, others: _named(others, "controller"), marks=pytest.mark.long),
        pytest.param(lambda _, others: _named(others, "fork_server"), marks=pytest.mark.long),
    ],
    ids=["owner", "controller", "fork server"],
)
def test_when_one_of_them_is_killed_all_others_end(
    who: Callable[[psutil.Process, list[psutil.Process]], psutil.Process],
) -> None:
    with _started() as (owner, others):
        (entry,) = registry.entries()
        who(owner, others).kill()
        _wait_for_the_end_of(others)
    assert not entry.folder.exists()


@pytest.mark.long
def test_a_kept_cluster_goes_on_and_can_be_attached() -> None:
    with _started(", keep=True") as (owner, others):
        owner.kill()
        owner.wait(30)
        time.sleep(1)
        assert all(process.is_running() for process in others)
        cluster = nbgpu.attach()
        try:
            assert cluster.execute("print(rank)") == {0: "0\n", 1: "1\n"}
            cluster.restart(rank=1)
            assert cluster.execute("print(rank)") == {0: "0\n", 1: "1\n"}
        finally:
            cluster.stop()
    _wait_for_the_end_of(others)


_CHILD = """
import subprocess, sys, time
code = "import os, time; from nbgpu.machine.watched import end_with; end_with(int(os.sys.argv[1])); time.sleep(600)"
import os
print(subprocess.Popen([sys.executable, "-c", code, str(os.getpid())]).pid, flush=True)
time.sleep(600)
"""


def test_a_helper_ends_with_its_parent() -> None:
    with _without_pidfds(_CHILD) as parent:
        helper = psutil.Process(int(_line(parent)))
        parent.kill()
        _wait_for_the_end_of([helper])
