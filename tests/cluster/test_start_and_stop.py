"""How clusters begin and end, also when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launching
import psutil
import pytest
from rows import Measured, row

import nbgpu
from nbgpu.client.cluster.cluster import current
from nbgpu.client.engines import processes
from nbgpu.client.engines.processes import Processes
from nbgpu.client.engines.results import collect
from nbgpu.client.host import registry
from nbgpu.config import own_file
from nbgpu.machine.processes import ProcessId

pytestmark = pytest.mark.cold


def test_start_returns_after_a_real_all_reduce_and_says_what_it_got() -> None:
    with nbgpu.Cluster(gpus="none", ranks=3) as cluster:
        assert cluster.describe() == "no GPU used: 3 CPU ranks, gloo"
        printed = cluster.execute("total = torch.ones(1); dist.all_reduce(total); print(rank, int(total))")
        assert printed == {0: "0 3\n", 1: "1 3\n", 2: "2 3\n"}
        assert current() is cluster
    with pytest.raises(nbgpu.NoClusterError, match="%nbgpu start"):
        current()


@pytest.mark.long
def test_a_collective_takes_no_longer_than_it_may() -> None:
    with nbgpu.Cluster(gpus="none", ranks=2, collective_timeout_s=2) as cluster:
        with pytest.raises(
            nbgpu.RankError, match=r"barrier, collective \d+ .* given up after 2 s .*: rank 1 had not come"
        ):
            cluster.execute("if rank == 0: dist.barrier()")
        # The group that is formed after a failure has the same limit, and works.
        printed = cluster.execute("total = torch.ones(1); dist.all_reduce(total); print(int(total))")
        assert printed == {0: "2\n", 1: "2\n"}


@pytest.mark.long
def test_ranks_wait_longer_for_a_result_than_for_a_collective(tmp_path: Path) -> None:
    path = own_file.create(str(tmp_path / "patient.py"))
    result = "    def result(self, model, device):\n        time.sleep(7)\n        return {'note': 'slept'}\n"
    path.write_text(
        path.read_text().replace("import torch\n", "import time\nimport torch\n", 1) + f"\n{result}"
    )
    with nbgpu.Cluster(gpus="none", ranks=2, collective_timeout_s=3) as cluster:
        run = cluster.train(str(path), steps=2, runs_dir=str(tmp_path / "runs")).wait(400)
        assert run.status == "finished"
        found = run.result()
        assert found is not None
        assert found["note"] == "slept"
        # Collectives that come after it have their timeout as before.
        with pytest.raises(
            nbgpu.RankError, match=r"barrier, collective \d+ .* given up after 3 s .*: rank 1 had not come"
        ):
            cluster.execute("if rank == 0: dist.barrier()")


def test_engines_that_cannot_start_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('this torch is broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(nbgpu.ClusterError, match="broken on purpose"):
        nbgpu.Cluster(gpus="none").start()


_OWNER = """
import os, sys, time, nbgpu
cluster = nbgpu.Cluster(gpus="none").start()
import psutil
print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
time.sleep(60)
"""


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@row("the kernel is killed", "engines, their parent and the controller end, and leave nothing", bound_s=2)
def test_when_the_owner_is_killed_engines_and_controller_go_too(measured: Measured) -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(processes) >= 4, "two engines, their fork server and the controller"
        (entry,) = registry.entries()
        measured.fault_now()
        os.kill(owner.pid, signal.SIGKILL)
        # A zombie has ended; how soon it is buried is up to the host.
        give_up_s = time.monotonic() + 10
        while not all(map(_has_ended, processes)) and time.monotonic() < give_up_s:
            time.sleep(0.01)
        measured.ended()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not entry.folder.exists()
    assert registry.entries() == []


def test_a_killed_rank_is_named_and_the_cell_ends() -> None:
    with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
        results = cluster.submit("import time; time.sleep(60)", ranks=[1])
        time.sleep(0.5)
        os.kill(cluster.pids[1], signal.SIGKILL)
        with pytest.raises(nbgpu.RankError, match="process of rank 1 is gone"):
            collect(results, timeout_s=30)
        assert "gone" in cluster.status()


@pytest.mark.long
def test_stop_can_be_repeated_and_start_again() -> None:
    cluster = nbgpu.Cluster(gpus="none", ranks=1).start()
    cluster.execute("kept = 1")
    cluster.stop()
    cluster.stop()
    with cluster, pytest.raises(nbgpu.RankError, match="kept"):
        cluster.execute("kept")


@pytest.mark.long
def test_stopping_the_cluster_ends_its_run(tmp_path: Path) -> None:
    cluster = nbgpu.Cluster(gpus="none", ranks=2).start()
    run = cluster.train(
        "autoencoder", runs_dir=str(tmp_path), data="phantoms", patch_size=16, num_phantoms=8, steps=100_000
    )
    give_up_s = time.monotonic() + 300
    while run.status != "training":
        assert time.monotonic() < give_up_s, f"{run} is {run.status}: {run.failures}"
        assert not run.over, f"{run} is {run.status}: {run.failures}"
        time.sleep(0.05)
    cluster.stop()
    assert run.over
    assert run.status == "stopped"


_STARTING = """
import sys, nbgpu
print("starting", flush=True)
nbgpu.Cluster(gpus="none").start()
"""


@pytest.mark.parametrize("after_s", [0.3, 0.8, 1.5])
def test_an_owner_killed_in_the_middle_of_the_start_leaves_nothing(after_s: float) -> None:
    """Nothing is asserted here: the fixture that looks for leftovers around every test does."""
    with subprocess.Popen([sys.executable, "-c", _STARTING], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "starting\n"
        time.sleep(after_s)
        os.kill(owner.pid, signal.SIGKILL)


@pytest.mark.long
def test_a_controller_that_ended_before_it_answered_is_noticed(tmp_path: Path) -> None:
    with nbgpu.Cluster(gpus="none", ranks=1) as cluster:
        connection = cluster.parts.state.connection_file.read_bytes()
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    controller = ProcessId.of(ended.pid)
    ended.communicate(b"\n")
    processes = Processes(tmp_path, {"controller": controller})
    processes.connection_file.parent.mkdir(parents=True)
    processes.connection_file.write_bytes(connection)
    started_s = time.monotonic()
    with pytest.raises(nbgpu.ClusterError, match="the controller ended during the start"):
        processes.connect(1, timeout_s=300)
    assert time.monotonic() - started_s < 60


def test_an_engine_that_came_while_the_client_connected_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller tells of it once, and a client that misses that would wait for ever."""
    from nbgpu.client.engines.connection import Client

    clients: list[Client] = []
    hear = Client._register_engine

    def the_first_is_deaf(client: Client, news: Any) -> None:
        if not clients:
            clients.append(client)
        if client is not clients[0]:
            hear(client, news)

    monkeypatch.setattr(Client, "_register_engine", the_first_is_deaf)
    monkeypatch.setattr(processes, "_REGISTRATION_TIMEOUT_S", 0.5)
    with nbgpu.Cluster(**launching.settings()) as cluster:
        assert cluster.parts.state.pool.client is not clients[0]
        assert cluster.execute("print(rank)") == {0: "0\n", 1: "1\n"}
