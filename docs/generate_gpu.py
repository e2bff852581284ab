"""Writes what was shown on a GPU into the sections about GPUs of docs/benchmarks.md, devices.md, faults.md
and training.md.

    python docs/generate_gpu.py [FOLDER ...]

A folder has slice1.json, slice2.json, ... as `make gpu` leaves them. Their records are added to those in
tests/gpu/shown.json, in which a check that was run again replaces its earlier record; without a folder those
of tests/_artifacts/gpu are added, if there are some.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(1, str(DOCS.parent / "tests" / "gpu"))

import checks  # noqa: E402 - a module of that folder

RESULTS = DOCS.parent / "tests" / "_artifacts" / "gpu"
PAGES = ("benchmarks", "devices", "faults", "training")
START, END = "<!-- gpu start -->", "<!-- gpu end -->"
_NOTHING = "Not run on a GPU yet. [gpu.md](gpu.md) says how, and the rows come from there."
_HEADING = "## On a GPU"
Record = Mapping[str, Any]


def collect(folders: Sequence[Path]) -> dict[str, Record]:
    """Return the records of shown.json with those of the slices in these folders, in the order of the checks.
    A check that is no longer there is left out.

    Raises:
        SystemExit: a folder has no slice, or has one of a rehearsal.
    """
    records: dict[str, Record] = dict(checks.shown())
    for folder in folders:
        paths = sorted(folder.glob("slice*.json"))
        if not paths:
            raise SystemExit(f"{folder} has no slice1.json or the like")
        for path in paths:
            found = json.loads(path.read_text())
            if found["rehearsal"]:
                raise SystemExit(f"{path} is of a rehearsal on CPU ranks, and says nothing about a GPU")
            for name, record in found["checks"].items():
                if record["status"] != "not run":
                    # The log of a failure is for whoever mends it.
                    kept = {key: value for key, value in record.items() if key != "log"}
                    records[name] = kept | {"machine": found["machine"]}
    return {name: records[name] for name in checks.load() if name in records}


def section(page: str, records: Mapping[str, Record]) -> str:
    """Return the section of one page: a row for each of its checks that was run, and what the others would
    show."""
    of_page = [check for check in checks.load().values() if check.page == page]
    rows = [_row(check.claim, records[check.name]) for check in of_page if check.name in records]
    if not rows:
        return f"{_HEADING}\n\n{_NOTHING}"
    machines = dict.fromkeys(
        _machine(records[check.name]["machine"]) for check in of_page if check.name in records
    )
    measured = "\n".join(f"{machine}; `make gpu`" for machine in machines)
    head = "| what is to hold | outcome | figures | when, and of which commit |\n|---|---|---|---|"
    left = [_in_a_cell(check.claim) for check in of_page if check.name not in records]
    missing = [f"Not run on a GPU yet: {'; '.join(left)}.", ""] if left else []
    return "\n".join([_HEADING, "", measured, "", *missing, head, *rows])


def _machine(machine: Mapping[str, Any]) -> str:
    libraries = (
        f"torch {machine['torch']} (CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, NCCL {machine['nccl']})"
    )
    return f"{machine['gpu']}, driver {machine['driver']}, {libraries}, Python {machine['python']}, {machine['cores']} cores"


def _row(claim: str, record: Record) -> str:
    outcome = {"failed": "**failed**"}.get(record["status"], record["status"])
    if record["reason"]:
        outcome += f": {_in_a_cell(record['reason'].splitlines()[0])}"
    figures = "; ".join(_figure(name, figure) for name, figure in record["figures"].items())
    return f"| {_in_a_cell(claim)} | {outcome} | {figures} | {record['date']}, {record['commit']} |"


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
    """Add to shown.json what the folders have, and write the sections."""
    own = [RESULTS] if not folders and any(RESULTS.glob("slice*.json")) else []
    records = collect([*map(Path, folders), *own])
    checks.SHOWN.write_text(json.dumps(records, indent=1) + "\n")
    for page in PAGES:
        path = DOCS / f"{page}.md"
        path.write_text(with_section(path.read_text(), section(page, records)))
    counts: dict[str, int] = {}
    for record in records.values():
        counts[record["status"]] = counts.get(record["status"], 0) + 1
    told = [f"{count} {status}" for status, count in sorted(counts.items())]
    told += [f"{len(checks.load()) - len(records)} not run"]
    sys.stdout.write(f"{', '.join(told)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
