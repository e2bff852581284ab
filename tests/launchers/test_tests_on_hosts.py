"""Tests of one host, run again with the ranks on other hosts; `make test-hosts` runs many more of them so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHOSEN = [
    "cells/test_questions.py",
    "cells/test_debugger.py::test_breakpoint",
    "cells/test_transfer.py",
    "faults/cluster/test_keep.py::test_a_cell_that_was_left_behind_can_be_stopped",
]


@pytest.mark.hosts
@pytest.mark.long
@pytest.mark.timeout(300)
def test_chosen_tests_pass_with_ranks_on_other_hosts(tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", "--launcher=hosts"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *CHOSEN],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
