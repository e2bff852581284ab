"""Writes what `make gpu` found into the sections about GPUs of docs/benchmarks.md, devices.md, faults.md and
training.md.

    python docs/generate_gpu.py [FOLDER ...]

A folder has slice1.json, slice2.json, ... as a GPU machine left them. They are added to those in
tests/_artifacts/gpu, in which a check that was run again replaces its earlier record. Without any results the
sections say that nothing was run on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "tests" / "_artifacts" / "gpu"
PAGES = ("benchmarks", "devices", "faults", "training")
START, END = "<!-- gpu start -->", "<!-- gpu end -->"
_NOTHING = "Not run on a GPU yet. [gpu.md](gpu.md) says how, and the rows come from there."
_HEADING = "## On a GPU"


def merged(earlier: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """One slice of two: each check as the newer one has it, unless it was not run there."""
    checks = dict(newer["checks"])
    for name, record in earlier["checks"].items():
        if checks.get(name, record)["status"] == "not run":
            checks[name] = record
    return {**newer, "checks": checks}


def collect(folders: Sequence[Path]) -> None:
    """Add the slices in these folders to those in RESULTS.

    Raises:
        SystemExit: a folder has no slice, or has one of a rehearsal.
    """
    for folder in folders:
        paths = sorted(folder.glob("slice*.json"))
        if not paths:
            raise SystemExit(f"{folder} has no slice1.json or the like")
        for path in paths:
            newer = json.loads(path.read_text())
            if newer["rehearsal"]:
                raise SystemExit(f"{path} is of a rehearsal on CPU ranks, and says nothing about a GPU")
            kept = RESULTS / path.name
            if kept.exists() and kept.resolve() != path.resolve():
                newer = merged(json.loads(kept.read_text()), newer)
            RESULTS.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(newer, indent=1) + "\n")


def section(page: str, slices: Iterable[Mapping[str, Any]]) -> str:
    """The section of one page, with a row for each of its checks."""
    rows, sources = [], []
    for found in slices:
        of_page = {name: record for name, record in found["checks"].items() if record["page"] == page}
        run = [record for record in of_page.values() if record["status"] != "not run"]
        sources += [(_machine(found["machine"]), record["commit"], record["date"]) for record in run]
        rows += [_row(record) for record in of_page.values()]
    if not sources:
        return f"{_HEADING}\n\n{_NOTHING}"
    measured = "\n".join(
        f"{machine}; commit {commit}, {date}; `make gpu`" for machine, commit, date in dict.fromkeys(sources)
    )
    head = "| what is to hold | outcome | figures |\n|---|---|---|"
    return "\n".join([_HEADING, "", measured, "", head, *rows])


def _machine(machine: Mapping[str, Any]) -> str:
    libraries = (
        f"torch {machine['torch']} (CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, NCCL {machine['nccl']})"
    )
    return f"{machine['gpu']}, driver {machine['driver']}, {libraries}, Python {machine['python']}, {machine['cores']} cores"


def _row(record: Mapping[str, Any]) -> str:
    outcome = {"failed": "**failed**"}.get(record["status"], record["status"])
    if record["reason"]:
        outcome += f": {_in_a_cell(record['reason'].splitlines()[0])}"
    figures = "; ".join(_figure(name, figure) for name, figure in record["figures"].items())
    return f"| {_in_a_cell(record['claim'])} | {outcome} | {figures} |"


def _figure(name: str, figure: Mapping[str, Any]) -> str:
    value, unit = figure["value"], figure["unit"]
    if isinstance(value, bool):
        shown = "yes" if value else "no"
    elif isinstance(value, int | float):
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    else:
        shown = str(value)
    return _in_a_cell(f"{name} {shown} {unit}".strip())


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]


def with_section(text: str, written: str) -> str:
    """A page with its section about GPUs replaced; it is added at the end of a page that has none."""
    before, start, rest = text.partition(START)
    after = rest.partition(END)[2] if start else "\n"
    return f"{before.rstrip()}\n\n{START}\n{written}\n{END}{after}"


def section_of(text: str) -> str:
    """The section about GPUs of a page, without its marks; empty where it has none."""
    return text.partition(START)[2].partition(END)[0].strip()


def main(folders: Sequence[str]) -> None:
    collect([Path(folder) for folder in folders])
    slices = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("slice*.json"))]
    for page in PAGES:
        path = DOCS / f"{page}.md"
        path.write_text(with_section(path.read_text(), section(page, slices)))
    counts: dict[str, int] = {}
    for found in slices:
        for record in found["checks"].values():
            counts[record["status"]] = counts.get(record["status"], 0) + 1
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    sys.stdout.write(f"{told or 'nothing was run on a GPU'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
