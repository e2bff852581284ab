"""Writes docs/faults.md from what a run of tests/faults measured (tests/_artifacts/faults.json)."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from generate_gpu import START, section_of, with_section

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "tests" / "_artifacts" / "faults.json"
PAGE = DOCS / "faults.md"
_ROW = re.compile(r"^\| (?!fault \|)(.+?) \| .*$", re.MULTILINE)
_FIRST_DATE = re.compile(r"^[0-9]{4}-[0-9]{2}-[0-9]{2}", re.MULTILINE)

_INTRODUCTION = """\
# Faults

The faults that may happen to a rank, what nbgpu promises for each, and what was measured. `make faults`
writes this page from a run of `tests/faults`, in which each row is declared on the test that causes the
fault.

Seconds are from the moment of the fault until the cell, or the run, has ended and the person can go on. They
include the forming of the new process group. A try counts only if the whole promise held. The bound is an
aim, and no test asserts it; a row without a bound promises no time. n is the number of tries: `make soak`
tries each row twenty times, and ranks, phases and sizes of clusters add up in one row. The load is that of
`uptime`, the median of a row's tries, where it was noted: how many processes wanted to run at the time, these
included.
"""


def page(found: dict[str, Any], previous: str) -> str:
    """The whole page.

    A row of the previous page stays where it counts more tries, because git ignores the results, and twenty
    tries of every row take hours. A row that no test declares any more is deleted by hand.
    """
    dates = sorted({row["date"] for row in found["rows"]} | set(_FIRST_DATE.findall(previous)))
    where = (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {found['hardware']}, torch {found['torch']}, "
        + (
            f"{found['gpus']} GPUs."
            if found["gpus"]
            else "no GPU: the rows that need one were not run, and NCCL was not tried."
        )
    )
    head = "| fault | promise | bound, s | median, s | worst, s | n | load | run on |\n|---|---|---|---|---|---|---|---|"
    previous_lines = {match[1]: match[0] for match in _ROW.finditer(previous)}
    lines = []
    for row in found["rows"]:
        line = previous_lines.pop(row["fault"], "")
        has_more_tries = not row["failed"] and _num_tries(line) > row["held"]
        lines.append(line if has_more_tries else _line(row))
    return "\n".join([_INTRODUCTION, where, "", head, *lines, *previous_lines.values()]) + "\n"


def _num_tries(line: str) -> int:
    """The number of tries in a row of the page; 0 where a try failed."""
    count = line.split(" | ")[5] if line else "0"
    return int(count) if count.isdigit() else 0


def _line(row: dict[str, Any]) -> str:
    taken = row["took_s"]
    bound = "" if row["bound_s"] is None else f"{row['bound_s']:g}"
    middle = f"{statistics.median(taken):.2f}" if taken else ""
    worst = f"{max(taken):.2f}" if taken else ""
    count = str(row["held"])
    if row["failed"]:
        count = f"**{row['held']} held, {len(row['failed'])} failed**"
    runs_on = row["runs_on"]
    if not row["held"] and not row["failed"]:
        count, runs_on = "0", f"{runs_on}: not run, {row['skipped']}"
    load = f"{statistics.median(row['loads']):.1f}" if row["loads"] else ""
    if row.get("at_real_time_priority"):
        load += ", at real-time priority"
    return (
        f"| {row['fault']} | {row['promise']} | {bound} | {middle} | {worst} | {count} | {load} | {runs_on} |"
    )


if __name__ == "__main__":
    # What `make gpu` has written stays.
    previous = PAGE.read_text()
    text = page(json.loads(RESULTS.read_text()), previous.partition(START)[0])
    PAGE.write_text(with_section(text, section_of(previous)))
