"""Who has no key gets nothing from a cluster and upsets nothing, whatever they connect to."""

from __future__ import annotations

import ast
import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import strangers
import zmq

import nbgpu
from nbgpu.engine.group import sockets

PACKAGE = Path(nbgpu.__file__).parent
RUN: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 50,
    "val_every": 0,
}


def listening_ports(cluster: nbgpu.Cluster) -> dict[int, str]:
    """Every TCP port that a process of the cluster listens on, with its address."""
    this = psutil.Process()
    found = {}
    for process in [this, *this.children(recursive=True)]:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.port] = connection.laddr.ip
    return found


def losses(run: nbgpu.Run) -> dict[tuple[int, int], float]:
    metrics = run.metrics()
    rows = metrics[metrics.loss.notna()]
    return {(row["rank"], row.step): row.loss for _, row in rows.iterrows()}


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_stranger_gets_nothing_and_upsets_nothing(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    undisturbed = losses(cluster2.train("autoencoder", **RUN, runs_dir=str(tmp_path)).wait(400))
    cluster2.execute("own = dist.new_group([0, 1])")
    run = cluster2.train("autoencoder", **RUN, runs_dir=str(tmp_path))
    while run.statuses()[0].step < 1:
        time.sleep(0.02)

    ports = listening_ports(cluster2)
    # ipyparallel's, a telemetry socket for each rank, and gloo's for three groups with those of DDP.
    assert len(ports) > 10
    assert set(ports.values()) == {"127.0.0.1"}
    for (port, saying), heard in strangers.heard_over_tcp(ports).items():
        assert strangers.is_nothing(heard), f"port {port} answered to {saying}: {heard!r}"
    with zmq.Context() as context:
        assert strangers.heard_over_zmq(ports, context) == []
        context.destroy(linger=0)
    assert losses(run.wait(400)) == undisturbed
    assert cluster2.execute("total = torch.ones(1); dist.all_reduce(total); print(int(total))") == {
        0: "2\n",
        1: "2\n",
    }


def test_only_the_user_can_enter_the_folders(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster2.train("autoencoder", **{**RUN, "steps": 2}, runs_dir=str(tmp_path)).wait(400)
    assert run.folder.stat().st_mode & 0o777 == 0o700
    security = cluster2.parts.state.connection_file.parent
    # The cluster's own folder, and those between it and the files with the keys.
    for folder in (security, security.parent, security.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    files = [*security.glob("ipcontroller-*.json"), *run.folder.glob("rank*.endpoint.json")]
    assert len(files) >= 2
    assert [f.name for f in files if f.stat().st_mode & 0o777 != 0o600] == []


PICKLING = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def pickling_collectives(source: str) -> list[int]:
    """The lines of some Python source that name one of torch's collectives for objects, which unpickle."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in PICKLING)
        or (isinstance(node, ast.Name) and node.id in PICKLING)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in PICKLING for alias in node.names))
    ]


def test_nothing_is_unpickled_that_came_over_a_process_group() -> None:
    """gloo's connections are not authenticated: who takes a rank's place there must not get to run code."""
    assert pickling_collectives("import torch.distributed as d\nd.all_gather_object(a, b)") == [2]
    assert pickling_collectives("from torch.distributed import broadcast_object_list as b") == [1]
    assert pickling_collectives("dist.all_reduce(a)") == []
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in pickling_collectives(path.read_text())
    }
    assert found == set()


CONNECT_AS = """
import os, socket, sys
uid, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.setuid(uid)
connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
connection.connect((address, port))
connection.sendall((0).to_bytes(8, "little"))
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("uid", [0, 65534])
@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_process_of_another_user_does_not_become_a_rank(uid: int, address: str) -> None:
    """gloo would take it for one: it needs to be faster than the rank, and to guess a small number."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", CONNECT_AS, str(uid), address, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as stranger, ExitStack() as stack:
            assert stranger.stdin is not None
            stack.callback(stranger.stdin.close)
            with sockets.noted_as_groups():
                connection, _ = listener.accept()
            stack.callback(connection.close)
            stack.callback(sockets.cut)
            if uid == os.getuid():
                sockets.refuse_other_users()
            else:
                with pytest.raises(ConnectionError, match=f"another user .uid {uid}. took a rank's place"):
                    sockets.refuse_other_users()


PR_SET_DUMPABLE = 4


def form_a_group_with(state: str) -> None:
    """Look whose the other end of a connection is that lies in this process."""
    os.setuid(65534)
    # Without this a process that has changed its user may not look at its own descriptors.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        connection = socket.socket()
        with sockets.noted_as_groups():
            # `create_connection` would import a codec, which this user may not be allowed to read.
            connection.connect(listener.getsockname())
        if state == "closed":
            listener.accept()[0].close()
        with closing(connection):
            sockets.refuse_other_users()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("state", ["not accepted yet", "closed"])
def test_an_end_that_no_process_has_is_not_taken_for_roots(state: str) -> None:
    """Kernels show it so, older ones also the first of the two. That ended the forming of a group for anybody
    but root."""
    child = multiprocessing.get_context("fork").Process(target=form_a_group_with, args=(state,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
