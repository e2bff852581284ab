"""A limit that is hardly above what a rank has is set all the same."""

from __future__ import annotations

import subprocess
import sys

# A process of its own, because a limit is of the whole process.
STEPS = """
import threading
import torch
from nbgpu.engine.memory import limit

limit.enforce(limit._process_bytes("VmRSS") + 3 * 2**20, torch.device("cpu"))
try:
    bytearray(64 * 2**20)
except MemoryError:
    print("refused")
with limit.lifted():
    print([thread.name for thread in threading.enumerate()][1:])
"""


def test_a_limit_that_leaves_no_room_for_the_stack_of_a_thread_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    assert done.stdout == "refused\n['nbgpu-memory-limit']\n", done.stderr
