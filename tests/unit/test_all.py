"""tests/all.sh: a failure anywhere fails the whole, and what cannot run is skipped, but not in CI.

The tools are stand-ins of two lines, because what counts here is what becomes of their answers.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "all.sh"
TOOLS = {
    "ruff": ".venv/bin",
    "mypy": ".venv/bin",
    "python": ".venv/bin",
    "npm": "bin",
    "node": "bin",
    "chromium": "bin",
}


@dataclass
class Answer:
    code: int
    summary: list[str]
    num_tried_again: int


def _run(
    folder: Path, lacking: Collection[str] = (), ci: bool = False, which: str = "", **scripts: str
) -> Answer:
    """Runs all.sh, with `which` as its argument, in a repository where each tool does nothing, or what
    `scripts` says."""
    for part in ("tests", "bin", ".venv/bin", "widgets/labextension", "nbgpu/static", "nbgpu/labextension"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    shutil.copy(SCRIPT, folder / "tests")
    for name in (
        "bash",
        "dirname",
        "mktemp",
        "mkdir",
        "cp",
        "rm",
        "diff",
        "find",
        "sha256sum",
        "sort",
        "cat",
        "grep",
        "nproc",
    ):
        link = folder / "bin" / name
        if not link.exists():
            link.symlink_to(str(shutil.which(name)))
    for name in TOOLS.keys() - set(lacking):
        tool = folder / TOOLS[name] / name
        tool.write_text(f"#!/bin/sh\n{scripts.get(name, 'exit 0')}\n")
        tool.chmod(0o755)
    environment = {"PATH": str(folder / "bin"), "TMPDIR": str(folder)} | ({"CI": "true"} if ci else {})
    done = subprocess.run(
        [folder / "bin" / "bash", folder / "tests" / "all.sh", *which.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    _, _, summary = done.stdout.partition("=== summary\n")
    *parts, tried_again = summary.splitlines()
    assert tried_again.startswith("tests that failed beside others and were tried again alone: ")
    return Answer(done.returncode, [line.split(" (")[0] for line in parts], int(tried_again.split()[-1]))


def test_all_is_well_where_every_part_is(tmp_path: Path) -> None:
    answer = _run(tmp_path)
    assert answer.code == 0
    assert answer.summary == [
        f"passed   {part}"
        for part in ("style", "format", "types", "front end", "front end, as committed", "pytest")
    ]


@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        ("", "not long and not release and not quality"),
        ("quick", "not long and not release and not quality and not slow"),
        ("long", "long and not release and not quality"),
        ("all", ""),
    ],
)
def test_each_target_has_its_tests_and_together_they_have_all(
    tmp_path: Path, which: str, chosen: str
) -> None:
    script = f'case "$*" in "-m pytest -m {chosen} "*) exit 0;; *) exit 1;; esac'
    answer = _run(tmp_path, which=which, python=script)
    assert answer.code == 0
    # The checks belong to `make test`, and a person who writes has an editor for style.
    assert ("passed   types" in answer.summary) == (which in ("", "all"))


def test_the_front_end_is_checked_again_only_after_a_change_of_it(tmp_path: Path) -> None:
    says_that_it_ran = "echo npm $* >> ../npm-ran; exit 0"
    assert _run(tmp_path, npm=says_that_it_ran.replace("../", str(tmp_path) + "/")).code == 0
    ran = (tmp_path / "npm-ran").read_text()
    assert "run build" in ran
    again = _run(tmp_path, npm="exit 1")
    assert again.code == 0
    assert "passed   front end" in again.summary
    (tmp_path / "widgets" / "panel.ts").write_text("export {}")
    changed = _run(tmp_path, npm="exit 1")
    assert changed.code == 1
    assert "FAILED   front end" in changed.summary
    assert _run(tmp_path, npm="exit 1").code == 1, "what has failed is not taken for what has passed"


def test_tests_that_are_tried_again_are_counted(tmp_path: Path) -> None:
    """They failed beside others and passed alone."""
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{\n  "tests/a.py::one": true,\n  "tests/b.py::two": true\n}')
    answer = _run(tmp_path, python='case "$*" in *--last-failed*) exit 0;; *) exit 1;; esac')
    assert (answer.code, answer.num_tried_again) == (0, 2)
    assert _run(tmp_path).num_tried_again == 0


@pytest.mark.parametrize(
    ("tool", "script", "failed"),
    [
        ("mypy", "exit 1", ["types"]),
        ("python", "exit 5", ["pytest"]),
        ("npm", 'test "$1" != ci', ["front end"]),
        ("npm", 'test "$2" != typecheck', ["front end"]),
        ("npm", 'test "$1" != test', ["front end"]),
        ("npm", 'test "$2" != build', ["front end, as committed"]),
        ("npm", 'test "$2" != build || echo changed > nbgpu/static/panel.js', ["front end, as committed"]),
        ("ruff", "exit 1", ["style", "format"]),
    ],
)
def test_one_failure_fails_the_whole_and_the_rest_still_runs(
    tmp_path: Path, tool: str, script: str, failed: list[str]
) -> None:
    answer = _run(tmp_path, **{tool: script})
    assert answer.code == 1
    assert [line.removeprefix("FAILED   ") for line in answer.summary if line.startswith("FAILED")] == failed
    assert len(answer.summary) == 6


@pytest.mark.parametrize(
    ("tool", "part"), [("node", "front end"), ("npm", "front end"), ("chromium", "browser tests")]
)
def test_what_is_lacking_is_skipped_and_named_but_fails_in_ci(tmp_path: Path, tool: str, part: str) -> None:
    here = _run(tmp_path / "here", lacking=[tool])
    assert here.code == 0
    (skipped,) = [line for line in here.summary if line.startswith("skipped")]
    assert skipped.startswith(f"skipped  {part}: there is no")

    in_ci = _run(tmp_path / "ci", lacking=[tool], ci=True)
    assert in_ci.code == 1
    assert [line for line in in_ci.summary if line.startswith(f"FAILED   {part}: there is no")]
