"""NBGPU_PLAIN_CELLS=1: cells do the same without their short cuts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from kernel import kernel

TESTS = Path(__file__).resolve().parents[1]

ON_THE_RANKS = """%%distributed --ranks 0
import sys
own = get_ipython().kernel
print(own._outputs is not None, 'flush' in vars(sys.stdout), 'should_run_async' in vars(get_ipython()))"""

IN_THE_NOTEBOOK = """
import sys
from nbgpu.client.notebook import head_start
sent_ahead, sockets = [], nbgpu.current().ranks._client._cell_sockets
begin = head_start._Begun.__init__
def note(self, *args):
    sent_ahead.append(args)
    begin(self, *args)
head_start._Begun.__init__ = note
"""


@pytest.mark.parametrize("switch", ["", "1"])
def test_the_switch_leaves_all_of_it_out(switch: str) -> None:
    is_quick = not switch
    with kernel(environment={"NBGPU_PLAIN_CELLS": switch}) as notebook:
        notebook.run(f"import nbgpu\n%load_ext nbgpu\n%nbgpu start {launching.flags()}")
        assert notebook.run(IN_THE_NOTEBOOK).status == "ok"
        assert notebook.run(ON_THE_RANKS).stdout == f"[0] {is_quick} {is_quick} {is_quick}\n"
        told = notebook.run("print(len(sent_ahead), len(sockets))").stdout
        assert told == ("1 1\n" if is_quick else "0 0\n")
        notebook.run("%nbgpu stop")


@pytest.mark.long
@pytest.mark.parametrize(
    "file",
    [
        "cells/test_cells.py",
        pytest.param("cells/test_output.py", marks=pytest.mark.release),
        pytest.param("cells/test_await.py", marks=pytest.mark.release),
        pytest.param("cells/test_magics_around.py", marks=pytest.mark.release),
        pytest.param("cells/test_questions.py", marks=pytest.mark.release),
        "faults/cells/test_interrupts.py",
    ],
)
def test_the_tests_of_cells_pass_with_it(file: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={tmp_path / 'inner'}",
            file,
        ],
        cwd=TESTS,
        env={**os.environ, "NBGPU_PLAIN_CELLS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
