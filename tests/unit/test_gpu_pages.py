"""The sections about GPUs, as they are written from what a machine with a GPU left, and what it runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import REPOSITORY

MACHINE = {
    "python": "3.12.3",
    "cores": 16,
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": 91900,
    "nccl": "2.28.9",
    "gpu": "NVIDIA H200",
    "driver": "580.159.03",
}
PASSED: dict[str, Any] = {
    "status": "passed",
    "reason": "",
    "figures": {"offered": {"value": 2, "unit": "GPUs"}, "equal": {"value": True, "unit": ""}},
    "seconds": 3.2,
    "commit": "abc1234",
    "date": "2026-11-25",
    "log": "much",
}
FAILED = PASSED | {"status": "failed", "reason": "AssertionError: off by 3\nmore", "figures": {}}
NOT_RUN = {"status": "not run", "reason": "the slice's time was over", "figures": {}, "seconds": 0.0}


def module(path: str) -> ModuleType:
    """A module of the repository that is no package's."""
    spec = importlib.util.spec_from_file_location(Path(path).stem.strip("_"), REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/generate_gpu.py, with pages and results in a folder of the test's own."""
    made = module("docs/generate_gpu.py")
    docs = tmp_path / "docs"
    docs.mkdir()
    for page in made.PAGES:
        (docs / f"{page}.md").write_text(
            f"# {page}\n\nbefore\n\n{made.START}\nfrom before\n{made.END}\n\nafter\n"
        )
    monkeypatch.setattr(made, "DOCS", docs)
    monkeypatch.setattr(made, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(made.checks, "SHOWN", tmp_path / "shown.json")
    return made


def came_back(folder: Path, rehearsal: bool = False, **checks: dict[str, Any]) -> str:
    """A folder as `make gpu` leaves it."""
    folder.mkdir()
    found = {"slice": 1, "rehearsal": rehearsal, "machine": MACHINE, "commit": "abc1234", "checks": checks}
    (folder / "slice1.json").write_text(json.dumps(found))
    return str(folder)


def test_without_results_the_pages_say_that_nothing_was_run(generate: ModuleType) -> None:
    generate.main([])
    for page in generate.PAGES:
        lines = (generate.DOCS / f"{page}.md").read_text().splitlines()
        assert lines[:5] == [f"# {page}", "", "before", "", generate.START]
        assert lines[5] == "## On a GPU"
        assert lines[7].startswith("Not run on a GPU yet.")
        assert lines[-3:] == [generate.END, "", "after"]


def test_a_page_has_what_was_run_with_machine_and_commit_and_names_the_rest(
    generate: ModuleType, tmp_path: Path
) -> None:
    folder = came_back(tmp_path / "back", picker=PASSED, doctor=FAILED, memory_shares=NOT_RUN, gone=PASSED)
    generate.main([folder])
    page = (generate.DOCS / "devices.md").read_text()
    assert "from before" not in page
    assert "NVIDIA H200, driver 580.159.03, torch 2.11.0+cu130 (CUDA 13.0, cuDNN 91900, NCCL 2.28.9)" in page
    claims = {name: check.claim for name, check in generate.checks.load().items()}
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in page.splitlines()}
    assert rows[claims["picker"]] == ["passed", "offered 2 GPUs; equal yes", "2026-11-25, abc1234 |"]
    assert rows[claims["doctor"]][0] == "**failed**: AssertionError: off by 3"
    (left,) = (line for line in page.splitlines() if line.startswith("Not run on a GPU yet: "))
    assert claims["memory_shares"] in left
    assert claims["picker"] not in left
    assert "Not run on a GPU yet. " in (generate.DOCS / "faults.md").read_text()
    assert list(generate.checks.shown()) == ["doctor", "picker"]
    assert "much" not in generate.checks.SHOWN.read_text()


def test_a_check_that_was_repeated_replaces_its_record_and_no_other(
    generate: ModuleType, tmp_path: Path
) -> None:
    generate.main([came_back(tmp_path / "first", picker=FAILED, doctor=PASSED)])
    generate.main([came_back(tmp_path / "repeated", picker=PASSED, doctor=NOT_RUN)])
    kept = generate.checks.shown()
    assert {name: record["status"] for name, record in kept.items()} == {
        "doctor": "passed",
        "picker": "passed",
    }
    assert "failed" not in (generate.DOCS / "devices.md").read_text()


def test_a_rehearsal_never_gets_into_the_pages(generate: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is of a rehearsal on CPU ranks"):
        generate.main([came_back(tmp_path / "rehearsal", rehearsal=True, picker=PASSED)])
    with pytest.raises(SystemExit, match="has no slice1"):
        generate.main([str(tmp_path)])
    assert not generate.checks.SHOWN.exists()


def test_the_committed_pages_are_those_of_what_was_shown() -> None:
    """`make gpu-pages` writes them, also when a check is new."""
    generate = module("docs/generate_gpu.py")
    for page in generate.PAGES:
        text = (REPOSITORY / "docs" / f"{page}.md").read_text()
        assert text.count(generate.START) == text.count(generate.END) == 1
        assert generate.section_of(text) == generate.section(page, generate.checks.shown())


def test_a_slice_runs_what_was_never_shown_and_then_what_has_changed_since(generate: ModuleType) -> None:
    runner = module("tests/gpu/__main__.py")
    checks = [
        generate.checks.load()[name] for name in ("picker", "doctor", "memory_shares", "plan", "nccl_stop")
    ]
    picker, _, shares, _, stop = checks
    known = {
        "picker": {"status": "passed", "code": picker.code},
        "doctor": {"status": "passed", "code": "of another day"},
        "memory_shares": {"status": "failed", "code": shares.code},
        "nccl_stop": {"status": "skipped", "code": stop.code},
    }
    assert [check.name for check in runner._in_order(checks, known)] == ["memory_shares", "plan", "doctor"]
    assert len({check.code for check in checks}) == len(checks)


def test_each_slice_has_checks_that_name_the_code_they_show(generate: ModuleType) -> None:
    checks = generate.checks.load().values()
    assert {check.slice for check in checks} == set(range(1, module("tests/gpu/__main__.py").NUM_SLICES + 1))
    assert all(len(check.code) == 16 for check in checks)
    assert {check.name for check in checks if not check.shows} == {"ceilings"}


def test_the_budgets_of_a_slice_fit_into_it_as_its_checks_are_begun(generate: ModuleType) -> None:
    """docs/gpu.md has the table."""
    runner = module("tests/gpu/__main__.py")
    page = (REPOSITORY / "docs" / "gpu.md").read_text()
    for number in range(1, runner.NUM_SLICES + 1):
        checks = [check for check in generate.checks.load().values() if check.slice == number]
        assert all(check.budget_s < generate.checks.CUT_OFF_S for check in checks)
        seconds = runner.budget_s(checks, runner.num_jobs(number))
        assert seconds <= generate.checks.SLICE_S
        assert f"| {number} | {len(checks)} | {seconds:.0f} s |" in page


def test_budgets_are_added_up_as_checks_are_begun(generate: ModuleType) -> None:
    runner = module("tests/gpu/__main__.py")

    def checks(*budgets: tuple[float, bool]) -> list[Any]:
        return [SimpleNamespace(budget_s=seconds, alone=alone) for seconds, alone in budgets]

    assert runner.budget_s([], 4) == 0
    assert runner.budget_s(checks((10, False), (20, False)), 4) == 20
    assert runner.budget_s(checks((10, False), (20, False), (5, False)), 2) == 20
    assert runner.budget_s(checks((10, False), (20, False), (15, False)), 2) == 25
    # One that runs alone waits for those before it, and those after it wait for it.
    assert runner.budget_s(checks((10, False), (20, True), (5, False), (5, False)), 4) == 35


@pytest.mark.parametrize("budget_s", [24.0, 25.0, 60.0])
def test_a_check_that_would_be_cut_off_cannot_be_declared(generate: ModuleType, budget_s: float) -> None:
    declare = generate.checks.check(
        "it ends", slice=1, page="faults", shows=(), budget_s=budget_s, name=f"takes_{budget_s:.0f}"
    )
    try:
        if budget_s < generate.checks.CUT_OFF_S:
            declare(print)
        else:
            with pytest.raises(AssertionError, match="split it"):
                declare(print)
    finally:
        generate.checks.CHECKS.pop(f"takes_{budget_s:.0f}", None)
