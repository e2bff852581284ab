"""What trained recipes reach beside their baselines, as the tests of `make quality` note it for the docs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "tests" / "_artifacts" / "quality.json"


def note(title: str, measure: str, seed: int, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep one measure of every method in a result's table.

    Args:
        title: what was trained on what, the heading of the table in the docs.
        measure: the column of the result's table that the gate is about.
        seed: of the run.
        table: the result's table, method by method.
    """
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    of_title = found.setdefault(title, {"measure": measure, "seeds": {}})
    of_title["measure"] = measure
    of_title["seeds"][str(seed)] = {name: row[measure] for name, row in table.items() if measure in row}
    of_title["commit"], of_title["torch"] = _commit(), torch.__version__
    of_title["date"] = datetime.now(UTC).date().isoformat()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _commit() -> str:
    """The commit whose code was measured, with a mark where it was changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "an unknown commit"
