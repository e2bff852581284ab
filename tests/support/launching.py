"""Where the ranks of the tests' clusters are: `pytest --launcher=hosts` has them on test hosts that dial in.

The tests themselves, and the notebooks that they start, are another host then, as a person's laptop is. All
hosts see the folders that tests get of pytest, and the checkout; the rest of /tmp is each host's own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hosts
import leaks
import pytest

LAUNCHERS = ("local", "hosts")
_NAMES = ("n1", "n2", "n3")
_POLL_PERIOD_S = 0.02

_launcher = "local"
_hosts: hosts.Hosts | None = None


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--launcher",
        choices=LAUNCHERS,
        default="local",
        help="where the ranks are: on this machine, or on test hosts that dial in",
    )


def pytest_configure(config: pytest.Config) -> None:
    global _launcher
    config.addinivalue_line(
        "markers", "one_host(reason): is skipped where the ranks are on other hosts (--launcher)"
    )
    _launcher = config.getoption("--launcher")
    # With xdist, the workers have the network.
    if _launcher == "hosts" and not getattr(config.option, "numprocesses", None):
        if reason := hosts.why_no_hosts():
            raise pytest.UsageError(reason)
        hosts.leave_the_network()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _launcher != "local" and (marker := item.get_closest_marker("one_host")):
        pytest.skip(f"with ranks on other hosts: {marker.args[0]}")


@pytest.fixture(scope="session", autouse=True)
def ranks_hosts(
    session_leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[hosts.Hosts | None]:
    """The hosts of the ranks; None where these are on this machine."""
    global _hosts
    if _launcher == "local":
        yield None
        return
    shared = tmp_path_factory.getbasetemp()
    with (
        hosts.make_hosts(
            _NAMES, shared / "hosts", shared=[shared, leaks.seen_by_ranks()], desk="desk"
        ) as made,
        _dialling_in(made, shared / "hosts") as is_of_a_host,
        leaks.holding(is_of_a_host),
    ):
        _hosts = made
        yield made
    _hosts = None


def settings(ranks: int = 2) -> dict[str, Any]:
    """Return the settings of a cluster with so many CPU ranks, on one to three hosts if not on this one."""
    if _launcher == "local":
        return {"gpus": "none", "ranks": ranks}
    nodes = 1 if ranks == 1 else 2 if ranks % 2 == 0 else 3
    assert ranks % nodes == 0
    each = ranks // nodes
    return {"launcher": "hosts", "gpus": "none", "nodes": nodes, "gpus_per_node": each, "interface": "eth0"}


def flags(ranks: int = 2) -> str:
    """The same settings as flags of `%nbgpu start`."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings(ranks).items())


def described(ranks: int = 2) -> str:
    """What is said of such a cluster."""
    count = f"{ranks} CPU ranks"
    return f"no GPU used: {count}, gloo" if _launcher == "local" else f"no GPU used: {count} on 2 hosts, gloo"


def called(rank: int) -> str:
    """The name by which messages call a rank of two."""
    return f"rank {rank}" if _launcher == "local" else f"rank {rank} on host n{rank + 1}"


def local_rank(rank: int) -> int:
    """The number of a rank of two on its own host."""
    return rank if _launcher == "local" else 0


def kill(pid: int, number: int, rank: int = 0) -> None:
    """Send a signal to the process of a rank, whose pid is that on its own host."""
    if _hosts is None:
        os.kill(pid, number)
        return
    host = list(_hosts.values())[rank % 2]
    host.run(["kill", f"-{int(number)}", str(pid)])


@contextmanager
def _dialling_in(made: hosts.Hosts, folder: Path) -> Iterator[Any]:
    """Have hosts dial in to every cluster that a test starts, as its owner would by hand."""
    over = threading.Event()
    started: list[subprocess.Popen[Any]] = []
    registry = Path(os.environ["NBGPU_STATE_DIR"])
    known: set[str] = set()

    def look() -> None:
        while not over.wait(_POLL_PERIOD_S):
            for entry in registry.glob("*/*.json"):
                # It may be removed at any moment.
                with suppress(OSError, ValueError):
                    dial_in(json.loads(entry.read_text()))

    def dial_in(entry: dict[str, Any]) -> None:
        join_file = Path(entry["folder"]) / "join.json"
        if entry["config"].get("launcher") != "hosts" or entry["folder"] in known or not join_file.exists():
            return
        copy = folder / f"{join_file.parent.name}.json"
        shutil.copy(join_file, copy)
        known.add(entry["folder"])
        for host in list(made.values())[: entry["config"].get("nodes", 1)]:
            command = [sys.executable, "-m", "nbgpu.cli", "host", "--join", str(copy)]
            with copy.with_name(f"{copy.stem}-{host.name}.log").open("w") as log:
                started.append(host.popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def is_of_a_host(leftover: leaks.Leftover) -> bool:
        return made.have(leftover.pid) or leftover.pid in {process.pid for process in started}

    thread = threading.Thread(target=look, name="hosts that dial in")
    thread.start()
    try:
        yield is_of_a_host
    finally:
        over.set()
        thread.join()
        for process in started:
            process.kill()
            process.wait()
