"""The table of faults: what may go wrong, what is promised then, and what a run of the tests measured.

A row is declared once, on the test that brings the fault about:

    @row("A rank raises while the others wait in {waits}", "all ranks are back", bound_s=1)
    @pytest.mark.parametrize("waits", WAITS)
    def test_one_rank_raises(notebook, measured, waits):
        # With a fault of faults.py, which notes the moment at which it happens.
        done = notebook.run(...)
        # The moment at which the person has their cell back, and what they read.
        measured.ended(done.error)

A fault that is no line of faults.py, such as a Stop, is noted with `measured.fault_now()`. Names in braces
are the test's parameters. Bounds are shown beside what was measured and are not asserted. At the end of a
session all rows go to tests/_artifacts/faults.json, where rows that did not run this time, or less often than
before without a failure, stay as they were, and `make faults` makes docs/faults.md of that. With
SOAK_REPEATS=20 each row runs twenty times.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leaks
import psutil
import pytest

RESULTS = Path(__file__).resolve().parents[1] / "_artifacts" / "faults.json"
REPEATS = int(os.environ.get("SOAK_REPEATS", "1"))


def row(fault: str, promise: str, bound_s: float | None, runs_on: str = "CPU, gloo") -> pytest.MarkDecorator:
    """Declares a row of the table.

    Args:
        fault: what happens. Names in braces are parameters of the test.
        promise: what holds then.
        bound_s: from the fault until the person has their cell, or the end of their run, back; None: no
            promise.
        runs_on: what the row needs.
    """
    return pytest.mark.row(fault=fault, promise=promise, bound_s=bound_s, runs_on=runs_on)


def moment() -> Path:
    """The file in which a rank notes when its fault happened; the clock is the same for all processes of a
    host."""
    return leaks.seen_by_ranks() / f"moment-of-the-fault-{os.getpid()}"


class Measured:
    """What the person saw of one fault."""

    def __init__(self) -> None:
        self.took_s: float | None = None
        self.message = ""
        self._fault_mono_s: float | None = None

    def fault_now(self) -> None:
        """The fault happens now."""
        self._fault_mono_s = time.monotonic()

    def fault_at(self, mono_s: float) -> None:
        """The fault happened at this time of the monotonic clock, which all test hosts share."""
        self._fault_mono_s = mono_s

    def ended(self, message: str = "") -> None:
        """The person has their notebook back, and has read this."""
        now_s = time.monotonic()
        if self._fault_mono_s is None:
            assert moment().exists(), (
                "no fault happened: neither did a rank note one, nor was fault_now called"
            )
            self._fault_mono_s = float(moment().read_text())
        self.took_s = now_s - self._fault_mono_s
        self.message = message


_measured = pytest.StashKey[Measured]()
_rows: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def no_moment_is_left_behind(test_leaves_nothing: None) -> Iterator[None]:
    """Before the look at what the test left behind: most tests with a fault do not ask when it happened."""
    yield
    moment().unlink(missing_ok=True)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Takes the measure of one fault, for the row that the test declares."""
    moment().unlink(missing_ok=True)
    request.node.stash[_measured] = Measured()
    return request.node.stash[_measured]


@pytest.fixture
def repetition() -> None:
    """Stands for the number of a repetition."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if REPEATS > 1 and metafunc.definition.get_closest_marker("row"):
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(REPEATS), indirect=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield
    mark = item.get_closest_marker("row")
    if mark is not None:
        _note(item, mark, report)
    return report


def _note(item: pytest.Item, mark: pytest.Mark, report: pytest.TestReport) -> None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    fault = mark.kwargs["fault"].format(**parameters)
    noted = _rows.setdefault(
        fault,
        {
            **mark.kwargs,
            "fault": fault,
            "date": time.strftime("%Y-%m-%d"),
            "took_s": [],
            "held": 0,
            "failed": [],
            "loads": [],
            "at_real_time_priority": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
            "skipped": "",
            "message": "",
        },
    )
    if report.when == "call":
        noted["loads"].append(round(os.getloadavg()[0], 2))
    if report.when == "setup" and report.skipped:
        noted["skipped"] = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        noted["failed"].append(item.name)
    elif report.when == "call" and report.passed:
        noted["held"] += 1
        measured = item.stash.get(_measured, None)
        if measured is not None and measured.took_s is not None:
            noted["took_s"].append(round(measured.took_s, 4))
            noted["message"] = _short(measured.message)


def _says_more(row: dict[str, Any], earlier: dict[str, Any] | None) -> bool:
    """Whether a row is kept in place of an earlier one: a single try that held says less than twenty."""
    return earlier is None or bool(row["failed"] or earlier["failed"]) or row["held"] >= earlier["held"]


def _short(message: str) -> str:
    """The first line of a message, which says what happened."""
    lines = [line.strip() for line in message.splitlines() if line.strip(" -")]
    return lines[0][:200] if lines else ""


def pytest_sessionfinish() -> None:
    if not _rows:
        return
    import torch  # only where rows ran: it takes seconds

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    RESULTS.parent.mkdir(exist_ok=True)
    found: dict[str, Any] = {
        "hardware": f"{len(os.sched_getaffinity(0))} cores of {model or platform.machine()}, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "torch": str(torch.__version__),
        "gpus": torch.cuda.device_count(),
    }
    # Each worker of pytest-xdist adds its own rows.
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if {name: earlier.get(name) for name in found} == found:
            # Others have been measured on the same machine.
            rows = {row["fault"]: row for row in earlier["rows"]}
            rows |= {name: row for name, row in _rows.items() if _says_more(row, rows.get(name))}
        else:
            rows = _rows
        found["rows"] = list(rows.values())
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
