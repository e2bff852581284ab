"""What `make quality` measured is a table for each recipe, with the commit that was measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import quality
from conftest import REPOSITORY


def test_the_tables_have_every_seed_and_method_and_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "RESULTS", tmp_path / "quality.json")
    rows = {"network": {"mse": 1.234e-5, "iou": 0.9}, "blur": {"mse": 0.002}, "a note": {}}
    for seed in (1, 0):
        quality.note("Masks", "mse", seed, rows)
    spec = importlib.util.spec_from_file_location("generate_quality", REPOSITORY / "docs/generate_quality.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = tmp_path / "benchmarks.md"
    page.write_text("before\n<!-- quality start -->\nold\n<!-- quality end -->\nafter\n")
    generate.RESULTS, generate.PAGE = quality.RESULTS, page
    generate.main()
    lines = page.read_text().splitlines()
    assert lines[:3] == ["before", "<!-- quality start -->", "### Masks: mse"]
    assert lines[-2:] == ["<!-- quality end -->", "after"]
    assert "commit " in lines[4]
    assert lines[6:10] == [
        "| | seed 0 | seed 1 |",
        "|---|---|---|",
        "| network | 1.234e-05 | 1.234e-05 |",
        "| blur | 0.002 | 0.002 |",
    ]
