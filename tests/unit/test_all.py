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


def _run(
    folder: Path, lacking: Collection[str] = (), ci: bool = False, which: str = "", **scripts: str
) -> Answer:
    """Runs all.sh, with `which` as its argument, in a repository where each tool does nothing, or what
    `scripts` says."""
    for part in ("tests", "bin", ".venv/bin", "widgets", "nbgpu/static", "nbgpu/labextension"):
        (folder / part).mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "tests")
    for name in ("bash", "dirname", "mktemp", "cp", "rm", "diff"):
        (folder / "bin" / name).symlink_to(str(shutil.which(name)))
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
        timeout=60,
        check=False,
    )
    _, _, summary = done.stdout.partition("=== summary\n")
    return Answer(done.returncode, [line.split(" (")[0] for line in summary.splitlines()])


def test_all_is_well_where_every_part_is(tmp_path: Path) -> None:
    answer = _run(tmp_path)
    assert answer.code == 0
    assert answer.summary == [
        f"passed   {part}"
        for part in ("style", "format", "types", "front end", "front end, as committed", "pytest")
    ]


def test_the_long_tests_come_alone_and_all_tests_are_one_or_the_other(tmp_path: Path) -> None:
    takes = 'case "$*" in *"{}"*) exit 0;; *) exit 1;; esac'
    answer = _run(tmp_path / "long", which="long", python=takes.format("-m long and not quality"))
    assert (answer.code, answer.summary) == (0, ["passed   pytest"])
    assert _run(tmp_path / "others", python=takes.format("-m not long and not quality")).code == 0


@pytest.mark.parametrize(
    ("tool", "script", "failed"),
    [
        ("mypy", "exit 1", ["types"]),
        ("python", "exit 5", ["pytest"]),
        ("npm", 'test "$1" != ci', ["front end"]),
        ("npm", 'test "$2" != typecheck', ["front end"]),
        ("npm", 'test "$1" != test', ["front end"]),
        ("npm", 'test "$2" != build', ["front end, as committed"]),
        ("npm", 'test "$2" != build || echo changed > ../nbgpu/static/panel.js', ["front end, as committed"]),
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
