"""A failed test shows the clusters' logs, and the next test gets shared fixtures that are new."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import after_failures
import pytest

INNER = """
import pytest, warm_start

made = []

@pytest.fixture(scope="session")
def of_all():
    made.append("of all")

@pytest.fixture(scope="module")
def shared(of_all):
    made.append("begun")
    yield made
    made.append("ended")

def test_well(shared):
    assert made == ["of all", "begun"]

def test_fails(shared):
    (warm_start.logs() / "nbgpu-abc-ipengine.log").write_text("what the engine said last")
    assert made == ["of all"]

def test_after_it(shared):
    assert made == ["of all", "begun", "ended", "begun"]

def test_after_that(shared):
    assert made == ["of all", "begun", "ended", "begun"]
"""


@pytest.mark.slow
def test_what_a_failure_leaves_and_what_not(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    support = Path(after_failures.__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "leaks", "-p", "after_failures", "-v", "test_inner.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(support), str(support / "warm")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=360,
    )
    kept = after_failures.KEPT / "test_inner-py-test_fails" / "nbgpu-abc-ipengine.log"
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert "FAILED" in next(line for line in done.stdout.splitlines() if "::test_fails" in line)
    assert "FAILED in its call: test_inner.py::test_fails" in done.stdout.partition("= FAILURES =")[0]
    assert f"the cluster's log {kept} ends with" in done.stdout
    assert "what the engine said last" in done.stdout
    assert kept.read_text() == "what the engine said last"
    kept.unlink()
    kept.parent.rmdir()
