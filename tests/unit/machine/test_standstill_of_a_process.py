"""A process that something outside of it keeps from going on is recognised, with what that is."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbgpu.machine import processes

PTRACE_ATTACH, PTRACE_DETACH = 16, 17
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.send_signal(signal.SIGCONT)
        process.kill()


def until(what: str, pid: int) -> str:
    give_up_s = time.monotonic() + 300
    while what not in (found := processes.standstill(pid)):
        assert time.monotonic() < give_up_s, found
        time.sleep(0.01)
    return found


def test_a_process_that_runs_does_not_stand_still(pid: int) -> None:
    assert processes.standstill(pid) == ""


def test_a_process_that_is_gone_does_not_stand_still() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert processes.standstill(process.pid) == ""


def test_a_stopped_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    assert f"kill -CONT {pid}" in until("is stopped", pid)
    os.kill(pid, signal.SIGCONT)
    give_up_s = time.monotonic() + 300
    while processes.standstill(pid):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_a_process_in_a_debugger_s_hands(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, pid, None, None):
        pytest.skip(f"no process may be traced here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(pid, 0)
    try:
        assert f"process {os.getpid()})" in until("a debugger", pid)
    finally:
        libc.ptrace(PTRACE_DETACH, pid, None, None)


def test_a_frozen_control_group(pid: int) -> None:
    group = FREEZER / f"nbgpu-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        assert group.name in until("is frozen", pid)
    finally:
        (group / "freezer.state").write_text("THAWED")
        (FREEZER / "cgroup.procs").write_text(str(pid))
        group.rmdir()
