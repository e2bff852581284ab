"""A notebook on one host whose ranks ssh starts on two others, which share no folder with it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from hosts.namespaces import Host, wait_until
from hosts.notebook import CellFailed, Notebook, open_notebook

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(300)]

PATIENCE_S = 120
SUM = "print(c.execute('t = torch.ones(1) * (rank + 1); dist.all_reduce(t); print(int(t))'))"
RIGHT = "{0: '10\\n', 1: '10\\n', 2: '10\\n', 3: '10\\n'}\n"


def start(ssh: hosts.SecureShell, **settings: object) -> str:
    """The cell that starts a cluster."""
    options = {"ssh": f"-F {ssh.configuration}"}
    given = {"hosts": ["n1", "n2"], "launcher_options": options, "gpus": "none", "gpus_per_node": 2}
    words = ", ".join(f"{name}={value!r}" for name, value in {**given, **settings}.items())
    return f"import nbgpu; c = nbgpu.Cluster(launcher='ssh', {words}); c.start()"


@pytest.fixture(scope="module")
def notebook(test_ssh: hosts.SecureShell) -> Iterator[Notebook]:
    with open_notebook(test_ssh.hosts["laptop"]) as opened:
        yield opened


@pytest.fixture(scope="module")
def started(test_ssh: hosts.SecureShell, notebook: Notebook) -> Iterator[Notebook]:
    notebook.run(start(test_ssh))
    yield notebook
    notebook.run("c.stop()")


def ranks_of(host: Host) -> list[int]:
    """The processes of a host that are none of its own."""
    return [pid for pid in host.pids() if b"sshd" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_ranks_of_both_hosts_are_one_group(started: Notebook) -> None:
    said = started.run(
        "print(c.execute('import platform; print(platform.node(), rank, local_rank, world_size)'))"
    )
    assert said == str({0: "n1 0 0 4\n", 1: "n1 1 1 4\n", 2: "n2 2 0 4\n", 3: "n2 3 1 4\n"}) + "\n"
    assert started.run(SUM) == RIGHT
    assert "4 CPU ranks on 2 hosts" in started.run("print(c.describe())")
