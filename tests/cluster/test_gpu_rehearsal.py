"""The checks of `make gpu` on CPU ranks, so that no minute of a GPU is spent on what fails without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

SLICES = (1, 2, 3)


def rehearsed(
    number: int, *names: str, folder: Path, seconds: float = 800, **environment: str
) -> tuple[int, dict[str, Any]]:
    """The exit code of a slice's rehearsal, and what it left."""
    command = [sys.executable, str(REPOSITORY / "tests" / "gpu"), str(number), *names, "--rehearse"]
    command += ["--quick", "--jobs", "2", "--folder", str(folder), "--seconds", str(seconds)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    found: dict[str, Any] = json.loads((folder / f"slice{number}.json").read_text())
    return done.returncode, found


@pytest.mark.release
def test_named_checks_leave_their_records_and_those_of_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    code, found = rehearsed(2, "picker", folder=tmp_path / "here", OUT=str(out), COMMIT="abc1234")
    assert code == 0
    assert found["rehearsal"]
    assert found["commit"] == "abc1234"
    assert {"torch", "python", "gpu", "cudnn"} <= found["machine"].keys()
    picker = found["checks"]["picker"]
    assert (picker["status"], picker["reason"], picker["page"]) == ("passed", "", "devices")
    assert picker["figures"] == {"offered": {"value": "no GPU", "unit": ""}}
    assert picker["seconds"] > 0
    assert len(picker["code"]) == 16
    assert found["checks"]["doctor"]["status"] == "not run"
    # What comes back from a borrowed machine is a few plain files in one folder.
    assert sorted(path.name for path in out.iterdir()) == ["slice2.json", "slice2.log"]
    assert json.loads((out / "slice2.json").read_text()) == found
    assert "==== picker: passed after" in (out / "slice2.log").read_text()

    code, found = rehearsed(2, "doctor", folder=tmp_path / "here", seconds=1)
    assert code == 0
    assert found["checks"]["doctor"]["reason"] == "the slice's time was over"
    assert found["checks"]["picker"]["status"] == "passed"


@pytest.mark.release
def test_a_check_that_is_cut_off_keeps_its_figures_and_the_next_one_runs(tmp_path: Path) -> None:
    """In a copy of the folder with three checks of its own."""
    copy = tmp_path / "tests" / "gpu"
    copy.mkdir(parents=True)
    for name in ("__main__.py", "one_check.py", "checks.py"):
        (copy / name).write_text((REPOSITORY / "tests" / "gpu" / name).read_text())
    text = (copy / "checks.py").read_text()
    begin, end = text.index("MODULES = "), text.index('"""The modules with checks')
    (copy / "checks.py").write_text(f'{text[:begin]}MODULES = ("mine",)\n{text[end:]}')
    (copy / "mine.py").write_text(
        "import os, signal, time\nfrom checks import Skipped, check\n"
        "@check('hangs', slice=1, page='faults', shows=(), timeout_s=1)\n"
        "def hangs(place):\n    place.figure('half', 0.5, 's')\n    time.sleep(600)\n"
        "@check('dies', slice=1, page='faults', shows=())\n"
        "def dies(place):\n    place.figure('pid', os.getpid())\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "@check('fails', slice=1, page='faults', shows=(), alone=True)\n"
        "def fails(place):\n    print('said before')\n    assert place.size(1, 2) == 1, 'it is two'\n"
        "@check('lacks', slice=1, page='faults', shows=())\n"
        "def lacks(place):\n    raise Skipped('there is no tape drive')\n"
    )
    command = [
        sys.executable,
        str(copy),
        "1",
        "--rehearse",
        "--jobs",
        "1",
        "--folder",
        str(tmp_path / "found"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    checks = json.loads((tmp_path / "found" / "slice1.json").read_text())["checks"]
    assert {name: record["status"] for name, record in checks.items()} == {
        "hangs": "failed",
        "dies": "failed",
        "fails": "failed",
        "lacks": "skipped",
    }
    assert checks["hangs"]["reason"].startswith("cut off after ")
    assert checks["hangs"]["figures"] == {"half": {"value": 0.5, "unit": "s"}}
    assert checks["dies"]["reason"] == "its process was ended by signal 9"
    assert "pid" in checks["dies"]["figures"]
    assert checks["fails"]["reason"] == "AssertionError: it is two"
    assert "said before" in checks["fails"]["log"]
    assert checks["lacks"]["reason"] == "there is no tape drive"
    assert done.stdout.splitlines()[-1].startswith("3 of 4 failed; ")


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", SLICES)
def test_the_quick_checks_of_a_slice_pass_on_cpu_ranks(number: int, tmp_path: Path) -> None:
    """Those that are left out here are part of `make gpu REHEARSE=1`."""
    code, found = rehearsed(number, folder=tmp_path)
    run = {name: record for name, record in found["checks"].items() if record["status"] != "not run"}
    assert {name: record["reason"] for name, record in run.items() if record["status"] != "passed"} == {}
    assert code == 0
    assert all(record["figures"] for record in run.values())
    assert len(run) >= 3
