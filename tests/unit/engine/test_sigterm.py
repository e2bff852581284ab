"""After SIGTERM a rank that works ends with its checkpoint; one that waits for a lost peer ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

RANK = """
import os, signal, time
from nbgpu.engine.group import activity
from nbgpu.engine.training import ending

ending._GRACE_S = 0.5
number = 0

def compute():
    until_s = time.process_time() + 0.4
    while time.process_time() < until_s:
        pass

with ending.listening(lambda: number):
    os.kill(os.getpid(), signal.SIGTERM)
    {work}
print("with a checkpoint", flush=True)
os._exit(0)
"""
STUCK = 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("time.sleep(0.2); number = 1; time.sleep(0.8)", 0),
        ("compute(); time.sleep(0.8)", 0),
        ("with activity.during('writing the last checkpoint'): time.sleep(1)", 0),
        ("time.sleep(30)", STUCK),
    ],
    ids=["a step", "a validation", "a slow disk", "a lost peer"],
)
def test_only_a_rank_that_waits_ends_by_itself(work: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", RANK.format(work=work)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("with a checkpoint" in done.stdout) == (code == 0)
