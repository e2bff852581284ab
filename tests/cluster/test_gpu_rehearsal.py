"""The checks of `make gpu` on CPU ranks, so that no minute of a GPU is spent on what fails without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REPOSITORY

SLICES = range(1, 7)


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
    code, found = rehearsed(6, "picker", folder=tmp_path / "here", OUT=str(out), COMMIT="abc1234")
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
    assert sorted(path.name for path in out.iterdir()) == ["slice6.json", "slice6.log"]
    assert json.loads((out / "slice6.json").read_text()) == found
    assert "==== picker: passed after" in (out / "slice6.log").read_text()

    code, found = rehearsed(6, "doctor", folder=tmp_path / "here", seconds=1)
    assert code == 0
    assert found["checks"]["doctor"]["reason"] == "the slice's time was over"
    assert found["checks"]["picker"]["status"] == "passed"


def runner_with(folder: Path, checks: str) -> Path:
    """A copy of the runner with checks of its own, which cuts them off after a second."""
    copy = folder / "tests" / "gpu"
    copy.mkdir(parents=True)
    for name in ("__main__.py", "one_check.py", "checks.py"):
        (copy / name).write_text((REPOSITORY / "tests" / "gpu" / name).read_text())
    text = (copy / "checks.py").read_text()
    begin, end = text.index("MODULES = "), text.index('"""The modules with checks')
    text = f'{text[:begin]}MODULES = ("mine",)\n{text[end:]}'
    (copy / "checks.py").write_text(text.replace("CUT_OFF_S = 25.0", "CUT_OFF_S = 1.2"))
    (copy / "mine.py").write_text(checks)
    return copy


@pytest.mark.release
def test_a_check_that_is_cut_off_keeps_its_figures_and_the_next_one_runs(tmp_path: Path) -> None:
    copy = runner_with(
        tmp_path,
        "import os, signal, time\nfrom checks import Skipped, check\n"
        "@check('hangs', slice=1, page='faults', shows=(), budget_s=1)\n"
        "def hangs(place):\n    place.figure('half', 0.5, 's')\n    time.sleep(600)\n"
        "@check('dies', slice=1, page='faults', shows=(), budget_s=1)\n"
        "def dies(place):\n    place.figure('pid', os.getpid())\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "@check('fails', slice=1, page='faults', shows=(), budget_s=1, alone=True)\n"
        "def fails(place):\n    print('said before')\n    assert place.size(1, 2) == 1, 'it is two'\n"
        "@check('lacks', slice=1, page='faults', shows=(), budget_s=1)\n"
        "def lacks(place):\n    raise Skipped('there is no tape drive')\n",
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
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


@pytest.mark.long
def test_a_figure_is_kept_though_the_runner_is_killed_while_its_check_goes_on(tmp_path: Path) -> None:
    copy = runner_with(
        tmp_path,
        "import time\nfrom checks import check\n"
        "@check('goes on', slice=1, page='faults', shows=(), budget_s=1)\n"
        "def goes_on(place):\n    place.figure('half', 0.5, 's')\n    time.sleep(600)\n",
    )
    kept = tmp_path / "found" / "slice1.json"
    command = [sys.executable, str(copy), "1", "--rehearse", "--folder", str(kept.parent)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    runner = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + 300
        while not kept.exists() or not json.loads(kept.read_text())["checks"]["goes_on"]["figures"]:
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        assert len(runner.children()) == 1
    finally:
        family = [runner, *runner.children(recursive=True)]
        for process in family:
            process.kill()
        runner.wait()
    record = json.loads(kept.read_text())["checks"]["goes_on"]
    assert record["figures"] == {"half": {"value": 0.5, "unit": "s"}}
    assert (record["status"], record["reason"]) == ("failed", "it was cut off")


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
