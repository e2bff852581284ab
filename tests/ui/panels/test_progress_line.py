"""The line below a cell, or in a terminal, that waits for a run or a sweep."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

SCRIPT = """
from nbgpu.client.ipykernel import notice
from nbgpu.client.ipykernel.notice import Progress, ProgressLine

notice.PERIOD_S = 0.0
steps = iter(range(1, 10))
line = ProgressLine(lambda: Progress(f"step {next(steps)} of 3" + " and so on" * 20, 0.5))
line.refresh()
line.refresh()
line.finish()
"""


def test_a_terminal_has_one_line_that_is_whole_at_the_end() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs, stdout=theirs) as process:
        os.close(theirs)
        told = b""
        try:
            while part := os.read(ours, 4096):
                told += part
        except OSError:  # how the end of a terminal looks
            pass
        os.close(ours)
    assert process.returncode == 0
    first, second, last = told.decode().split("\r\x1b[K")[1:]
    assert first.startswith("step 1 of 3")
    assert len(second) < 80  # a line that is wrapped cannot be written over
    assert last == "step 3 of 3" + " and so on" * 20 + "\r\n"


def test_a_file_gets_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, timeout=180)
    assert done.stdout + done.stderr == b""
