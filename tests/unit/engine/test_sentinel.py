"""The thread that frees a rank from a group, and ends it when its cluster is over."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

HANG_S = 300
"""Far longer than anything here takes: only something that hangs reaches it."""

BEGIN = """
import os, resource, socket, subprocess, sys, threading, time
from pathlib import Path

from nbgpu.engine.group import group
from nbgpu.engine.process.boot import Sentinel
from nbgpu.machine import watched
from nbgpu.protocol.records import GivenUp

given_up = threading.Event()
group.give_up = lambda generation: generation == 7 and given_up.set()

folder = Path(sys.argv[1])
owner = subprocess.Popen(["sleep", "600"])
Sentinel(watched.LifetimeWatch(folder, watched.watch(owner.pid, folder), ()), folder)
"""


def rank_with_sentinel(code: str, folder: Path) -> int:
    """Run code in a process that has a sentinel, and return the exit code of the process."""
    script = BEGIN + code + "\nowner.kill()\nowner.wait()\nos._exit(0)"
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)], check=False, timeout=HANG_S, capture_output=True
    ).returncode


def test_a_message_that_names_no_generation_does_not_end_the_rank(tmp_path: Path) -> None:
    code = f"""
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    for message in (b"", b"nonsense", b"7"):
        sender.sendto(message, str(folder / GivenUp.socket_name(os.getpid())))
given_up.wait({HANG_S})
"""
    assert rank_with_sentinel(code, tmp_path) == 0


def test_a_rank_with_too_many_open_files_ends_when_its_cluster_is_over(tmp_path: Path) -> None:
    code = f"""
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
owner.kill()
time.sleep({HANG_S})
"""
    assert rank_with_sentinel(code, tmp_path) == -signal.SIGKILL
