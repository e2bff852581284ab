"""What a failed test leaves to read, and what it does not leave to the next test.

A failed test is named at once: a session that is ended from outside, as CI does at its time limit, shows no
report. The report of a failed test ends with the logs of the clusters that ran during it, which are kept in
tests/_artifacts/logs. Fixtures of its module, such as a cluster or a notebook that several tests share, are
ended, and made anew for the next test: what went wrong in one test is nothing that the next one starts with.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import leaks
import pytest
import warm_start

KEPT = Path(__file__).resolve().parents[1] / "_artifacts" / "logs"
_NUM_LINES = 20

_began_s = pytest.StashKey[float]()
_has_failed = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_began_s] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield
    if report.failed:
        item.stash[_has_failed] = True
        for log in _logs_during(item.stash.get(_began_s, 0.0)):
            kept = KEPT / re.sub(r"\W+", "-", item.nodeid)[:150]
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, kept / log.name)
            lines = log.read_text(errors="replace").splitlines()[-_NUM_LINES:]
            report.sections.append((f"the cluster's log {kept / log.name} ends with", "\n".join(lines)))
    return report


def _logs_during(began_s: float) -> list[Path]:
    """The logs that are not empty of clusters which run, or which were started since then."""
    logs = sorted(warm_start.logs().iterdir(), key=lambda log: log.stat().st_mtime)
    return [
        log
        for log in logs
        # The cluster's own name of the file goes with its folder.
        if log.stat().st_size and (log.stat().st_nlink > 1 or log.stat().st_ctime >= began_s)
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if item.stash.get(_has_failed, False) and nextitem is not None and nextitem.path == item.path:
            chain = [node for node in nextitem.listchain() if not isinstance(node, _OF_A_MODULE)]
            # pytest ends the fixtures of all that the next test does not belong to. It is told of one that
            # belongs to the folders alone.
            item.session._setupstate.teardown_exact(SimpleNamespace(listchain=lambda: chain))


_OF_A_MODULE = (pytest.Module, pytest.Class, pytest.Item)


class _NamesFailures:
    """Prints a line for each failure as soon as it is known."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A worker of pytest-xdist has no terminal.
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write(f"\nFAILED in its {report.when}: {report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_NamesFailures(config))
    # A worker, and a session that a test starts, keep what the others have kept.
    if "/" not in leaks.session_marker():
        shutil.rmtree(KEPT, ignore_errors=True)
