"""Tests of one host, run again with the ranks on other hosts; `make test-hosts` runs many more of them so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
OF_CELLS = [
    "cells/test_questions.py",
    "cells/test_debugger.py::test_breakpoint",
    "cells/test_transfer.py",
    "faults/cluster/test_keep.py::test_a_cell_that_was_left_behind_can_be_stopped",
]
OF_RUNS = [
    "runs/test_resume.py::test_auto_passes_over_a_damaged_checkpoint_loudly",
    "runs/test_resume.py::test_epochs_go_on_from_where_they_were_with_another_batch_size",
    "ui/panels/test_controls.py::test_a_search_shows_its_pictures_and_has_no_batches",
    "ui/panels/test_controls.py::test_a_run_that_goes_on_takes_no_half_typed_value",
]


@pytest.mark.hosts
@pytest.mark.long
@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(OF_CELLS, id="cells"),
        pytest.param(OF_RUNS, id="runs"),
    ],
)
def test_chosen_tests_pass_with_ranks_on_other_hosts(chosen: list[str], tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", "--launcher=hosts"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
