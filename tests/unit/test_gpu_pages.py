"""The sections about GPUs, as they are written from what a machine with a GPU left behind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import REPOSITORY

SAMPLE = Path(__file__).with_name("gpu_sample.json")
"""A slice of a rehearsal, as it was recorded."""


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/generate_gpu.py, with pages and results in a folder of the test's own."""
    spec = importlib.util.spec_from_file_location("generate_gpu", REPOSITORY / "docs/generate_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    docs = tmp_path / "docs"
    docs.mkdir()
    for page in module.PAGES:
        (docs / f"{page}.md").write_text(
            f"# {page}\n\nbefore\n\n{module.START}\nfrom before\n{module.END}\n\nafter\n"
        )
    monkeypatch.setattr(module, "DOCS", docs)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return module


def came_back(folder: Path, **checks: dict[str, Any]) -> Path:
    """A folder with the recorded slice as if it were of a GPU, with some records changed."""
    found = json.loads(SAMPLE.read_text())
    found |= {"rehearsal": False, "commit": "abc1234"}
    found["machine"] |= {"gpu": "NVIDIA H200", "driver": "580.159.03", "cuda": "13.0", "nccl": "2.28.9"}
    for name, changed in checks.items():
        found["checks"][name] |= changed
    folder.mkdir()
    (folder / "slice1.json").write_text(json.dumps(found))
    return folder


def test_without_results_the_pages_say_that_nothing_was_run(generate: ModuleType) -> None:
    generate.main([])
    for page in generate.PAGES:
        lines = (generate.DOCS / f"{page}.md").read_text().splitlines()
        assert lines[:5] == [f"# {page}", "", "before", "", generate.START]
        assert lines[5] == "## On a GPU"
        assert lines[7].startswith("Not run on a GPU yet.")
        assert lines[-3:] == [generate.END, "", "after"]


def test_a_page_has_a_row_for_each_of_its_checks_and_says_where_they_ran(
    generate: ModuleType, tmp_path: Path
) -> None:
    failed = {"status": "failed", "reason": "AssertionError: off by 3\nmore", "figures": {}}
    folder = came_back(
        tmp_path / "back",
        picker={**failed, "commit": "abc1234", "date": "2026-11-25"},
        memory_shares={"status": "not run", "reason": "the slice's time was over", "figures": {}},
    )
    generate.main([str(folder)])
    checks = json.loads((folder / "slice1.json").read_text())["checks"]
    page = (generate.DOCS / "devices.md").read_text()
    assert "from before" not in page
    assert "NVIDIA H200, driver 580.159.03, torch " in page
    assert "(CUDA 13.0, cuDNN " in page
    assert "; commit abc1234, 20" in page
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")
    }
    of_page = [record for record in checks.values() if record["page"] == "devices"]
    assert len(rows) == len(of_page) + 1
    assert rows[checks["picker"]["claim"]].split(" | ")[1] == "**failed**: AssertionError: off by 3"
    assert rows[checks["memory_shares"]["claim"]].split(" | ")[1] == "not run: the slice's time was over"
    assert " | passed | findings 'ok' " in rows[checks["doctor"]["claim"]]
    # A page of which nothing was run says so, whatever was run for others.
    assert "Not run on a GPU yet." not in page


def test_a_check_that_was_repeated_replaces_its_record_and_no_other(
    generate: ModuleType, tmp_path: Path
) -> None:
    failed = {"status": "failed", "reason": "AssertionError: off by 3", "figures": {}}
    first = came_back(tmp_path / "first", picker=failed)
    not_run = {"status": "not run", "reason": "", "figures": {}}
    names = json.loads(SAMPLE.read_text())["checks"]
    repeated = came_back(tmp_path / "repeated", **{name: not_run for name in names if name != "picker"})
    generate.main([str(first), str(repeated)])
    kept = json.loads((generate.RESULTS / "slice1.json").read_text())["checks"]
    assert kept["picker"]["status"] == "passed"
    assert kept["doctor"]["status"] == "passed"
    assert "failed" not in (generate.DOCS / "devices.md").read_text()


def test_a_rehearsal_never_gets_into_the_pages(generate: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    (folder / "slice1.json").write_text(SAMPLE.read_text())
    with pytest.raises(SystemExit, match="is of a rehearsal on CPU ranks"):
        generate.main([str(folder)])
    with pytest.raises(SystemExit, match="has no slice1"):
        generate.main([str(tmp_path)])
    assert not generate.RESULTS.exists()


def test_the_committed_pages_have_the_section(generate: ModuleType) -> None:
    for page in generate.PAGES:
        text = (REPOSITORY / "docs" / f"{page}.md").read_text()
        assert text.count(generate.START) == text.count(generate.END) == 1
        assert generate.section_of(text).startswith("## On a GPU\n")
