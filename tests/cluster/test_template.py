"""The ranks that the tests' template forks have what those of a cold start have (tests/support/warm)."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
import warm_start

import nbgpu

WHAT_A_RANK_HAS = """
import gc, locale, os, pathlib, re, resource, signal, sys, tempfile, threading, warnings

import torch

def kinds_of_descriptors():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sorted(re.sub(r"\\d+|/tmp/.*", "", os.readlink(link)) for link in links if os.path.lexists(link))

def status(*names):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(names)]

found = {
    "path": sys.path, "argv": len(sys.argv), "flags": str(sys.flags), "warnings": sys.warnoptions,
    "variables": {n: v for n, v in os.environ.items() if not n.startswith(("IPP_", "NBGPU_", "PYDEVD_", "MASTER_PORT"))},
    "folder": os.getcwd(), "temporary": tempfile.gettempdir(), "session": os.getsid(0) == os.getppid(),
    "signals": {n: str(signal.getsignal(n)).partition(" at ")[0] for n in sorted(signal.valid_signals())},
    "status": status("Umask", "SigBlk", "SigIgn", "Cpus_allowed_list", "NoNewPrivs"),
    "limits": [resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource)) if n.startswith("RLIMIT_")],
    "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), len(threading.enumerate())),
    "torch": (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
    "locale": locale.getlocale(), "gc": gc.isenabled(), "main": sys.modules["__main__"].__name__,
    "encodings": (sys.stdout.encoding, sys.getfilesystemencoding()),
    "descriptors": kinds_of_descriptors(),
}
told = {name: value if name == "variables" else repr(value) for name, value in found.items()}
"""
"""Left out are the names of the cluster, and a variable that debugpy sets when it is imported."""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_fork_is_as_a_cold_start(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_start.begin()
    warm_start.wait_until_ready()
    found = {}
    for is_warm in (False, True):
        if not is_warm:
            monkeypatch.delenv(warm_start.FOLDER)
        with nbgpu.Cluster(gpus="none", ranks=num_ranks) as cluster:
            assert (warm_start.owner_of(_parent(cluster)) is not None) == is_warm
            cluster.execute(WHAT_A_RANK_HAS)
            found[is_warm] = cluster.pull("told", ranks="all")
        monkeypatch.undo()
    for rank in range(num_ranks):
        warm, cold = found[True][rank], found[False][rank]
        assert warm.pop("variables") == cold.pop("variables")
        assert warm == cold


def test_a_request_that_is_cut_off_leaves_the_template_at_work() -> None:
    """As where a test kills the process that asks."""
    warm_start.begin()
    warm_start.wait_until_ready()
    with socket.socket(socket.AF_UNIX) as connection, tempfile.TemporaryFile() as log:
        connection.connect(str(Path(os.environ[warm_start.FOLDER]) / "requests"))
        socket.send_fds(connection, [(100).to_bytes(4, "big")], [log.fileno()])
        connection.sendall(b"{")
    with nbgpu.Cluster(gpus="none", ranks=1) as cluster:
        assert warm_start.owner_of(_parent(cluster)) is not None


def _parent(cluster: nbgpu.Cluster) -> int:
    from conftest import fork_server

    return fork_server(cluster)
