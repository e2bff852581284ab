"""Ranks on two hosts that dial in: here two processes, each with its own private folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import leaks
import psutil
import pytest
from warm_start import launcher_of

import nbgpu
from nbgpu.client.engines.other_hosts import joining
from nbgpu.client.host import registry
from nbgpu.config import ClusterConfig
from nbgpu.host import versions
from nbgpu.machine import transports
from nbgpu.machine.transports import ChosenTransport
from nbgpu.protocol.records import Device

PATIENCE_S = 300.0
SUM = "t = torch.ones(1) * (rank + 1); dist.all_reduce(t); print(int(t))"
RIGHT = dict.fromkeys(range(4), "10\n")


def wait_until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def dial_in(join_file: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nbgpu.cli", "host", "--join", str(join_file)]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


class TwoHosts:
    """A cluster whose start waits for two hosts, which dial in on a thread."""

    def __init__(self, folder: Path) -> None:
        self.cluster = nbgpu.Cluster(
            launcher="hosts",
            nodes=2,
            gpus_per_node=2,
            gpus="none",
            interface="lo",
            start_timeout_s=PATIENCE_S,
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.logs = [folder / "host0.log", folder / "host1.log"]
        thread = threading.Thread(target=self._dial_in)
        thread.start()
        try:
            self.cluster.parts.lifecycle.start()
        except BaseException:
            thread.join()
            self.end()
            raise
        thread.join()

    def _dial_in(self) -> None:
        wait_until(lambda: self.cluster.join_file is not None)
        assert self.cluster.join_file is not None
        self.mode = self.cluster.join_file.stat().st_mode & 0o777
        self.processes = [dial_in(self.cluster.join_file, log) for log in self.logs]

    def folders(self) -> list[Path]:
        return [Path(host.description.folder) for host in self.cluster.parts.state.pool.members]

    def end(self) -> None:
        self.cluster.stop()
        for process in self.processes:
            # Killed at once, it would leave its folder behind.
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    there = TwoHosts(tmp_path_factory.mktemp("hosts"))
    try:
        with ExitStack() as held:
            for process in there.processes:
                held.enter_context(leaks.holding_family_of(process.pid))
            yield there
    finally:
        there.end()


@pytest.mark.long
def test_ranks_are_numbered_host_by_host(two: TwoHosts) -> None:
    assert two.mode == 0o600
    said = two.cluster.execute(
        "import os; print(rank, local_rank, world_size, os.environ['LOCAL_WORLD_SIZE'])"
    )
    assert said == {0: "0 0 4 2\n", 1: "1 1 4 2\n", 2: "2 0 4 2\n", 3: "3 1 4 2\n"}
    assert two.cluster.execute(SUM) == RIGHT
    assert "4 CPU ranks on 2 hosts" in two.cluster.describe()
    first, second = two.folders()
    assert first != second
    assert [path.stat().st_mode & 0o777 for path in (first, second)] == [0o700, 0o700]


@pytest.mark.long
def test_ranks_on_several_hosts_have_what_torchrun_sets(two: TwoHosts) -> None:
    names = "RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"
    said = two.cluster.execute(f"import os; print(*(os.environ[name] for name in {names}))")
    assert said == {0: "0 0 0 2\n", 1: "1 1 0 2\n", 2: "2 0 1 2\n", 3: "3 1 1 2\n"}
    masters = two.cluster.execute("print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    assert len(set(masters.values())) == 1


@pytest.mark.long
def test_each_rank_is_the_child_of_its_own_host(two: TwoHosts) -> None:
    owners = {launcher_of(psutil.Process(pid).ppid()) for pid in two.cluster.pids.values()}
    assert owners == {process.pid for process in two.processes}


@pytest.mark.long
def test_the_status_names_the_hosts_and_their_ranks_lines(two: TwoHosts) -> None:
    lines = two.cluster.status().splitlines()[2:]
    named = {host.name for host in two.cluster.parts.state.pool.members}
    assert {line.split()[1] for line in lines} == named
    assert all(line.endswith("idle") for line in lines)


@pytest.mark.long
def test_values_travel_both_ways(two: TwoHosts) -> None:
    two.cluster.push(numbers=list(range(100_000)))
    assert two.cluster.execute("print(len(numbers))") == dict.fromkeys(range(4), "100000\n")
    assert two.cluster.pull("rank", ranks=[0, 3]) == {0: 0, 3: 3}


@pytest.mark.long
def test_a_rank_that_raises_frees_those_on_the_other_host(two: TwoHosts) -> None:
    with pytest.raises(nbgpu.RankError, match="rank 3: ZeroDivisionError"):
        two.cluster.execute("if rank == 3:\n    1 / 0\ndist.barrier()")
    assert two.cluster.execute(SUM) == RIGHT


@pytest.mark.long
def test_stop_interrupts_ranks_on_both_hosts(two: TwoHosts) -> None:
    timer = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        two.cluster.execute("import time\nif rank:\n    time.sleep(600)\ndist.barrier()")
    timer.join()
    assert two.cluster.execute(SUM) == RIGHT


@pytest.mark.long
def test_a_rank_that_is_killed_is_replaced_on_its_own_host(two: TwoHosts) -> None:
    os.kill(two.cluster.pids[2], signal.SIGKILL)
    wait_until(two.cluster.ranks.gone)
    with pytest.raises(
        nbgpu.ClusterError, match=r"rank 2 on host \S+ was killed by SIGKILL[^.]*\. rank 2 was replaced"
    ):
        two.cluster.execute("1")
    assert two.cluster.execute(SUM) == RIGHT
    test_each_rank_is_the_child_of_its_own_host(two)


@pytest.mark.long
def test_nothing_listens_beyond_the_chosen_interface(two: TwoHosts) -> None:
    mine = [psutil.Process(), *two.processes]
    families = {
        p for each in mine for p in [each.pid, *(c.pid for c in psutil.Process(each.pid).children(True))]
    }
    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.pid in families
    ]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}


@pytest.mark.long
def test_another_version_is_refused_by_the_hosts_name(two: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptions = [host.description for host in two.cluster.parts.state.pool.members]
    monkeypatch.setattr(versions, "here", lambda: dict(descriptions[0].versions) | {"torch": "0.1"})
    with pytest.raises(nbgpu.ClusterError, match=rf"host {descriptions[0].name} has torch .* and not 0\.1"):
        joining._require_same_versions(descriptions)


@pytest.mark.long
def test_a_host_too_many_gets_no_ranks_and_ends_by_ctrl_c(two: TwoHosts, tmp_path: Path) -> None:
    assert two.cluster.join_file is not None
    client = two.cluster.ranks._client
    before = set(client.ids)
    host = dial_in(two.cluster.join_file, tmp_path / "log")
    wait_until(lambda: set(client.ids) - before)
    assert two.cluster.execute(SUM) == RIGHT
    host.send_signal(signal.SIGINT)
    assert host.wait(PATIENCE_S) == 0
    assert "SIGINT ends this host's part of the cluster" in (tmp_path / "log").read_text()


def test_a_file_that_is_no_join_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "join.json").write_text('{"some": "other"}')
    host = dial_in(tmp_path / "join.json", tmp_path / "log")
    assert host.wait(PATIENCE_S) == 1
    assert "is not a join file" in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_host_that_does_not_reach_the_controller_says_where_it_looked(
    two: TwoHosts, tmp_path: Path
) -> None:
    assert two.cluster.join_file is not None
    join = json.loads(two.cluster.join_file.read_text())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = join["engine_connection"]["registration"] = closed.getsockname()[1]
        (tmp_path / "join.json").write_text(json.dumps(join))
        host = dial_in(tmp_path / "join.json", tmp_path / "log")
        assert host.wait(PATIENCE_S) == 1
    said = (tmp_path / "log").read_text()
    assert f"does not answer at 127.0.0.1:{port}, interface lo" in said


@pytest.mark.long
def test_hosts_end_without_the_controller_and_leave_nothing(two: TwoHosts) -> None:
    """As when the notebook's host is lost: nobody tells them."""
    folders, pids = two.folders(), list(two.cluster.pids.values())
    two.cluster.parts.state.pool.processes.leaders["controller"].send(signal.SIGKILL)
    wait_until(lambda: all(process.poll() is not None for process in two.processes))
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    wait_until(lambda: not any(folder.exists() for folder in folders))


def test_sweeps_and_studies_are_refused_on_other_hosts() -> None:
    with pytest.raises(nbgpu.ConfigError, match="does not go with a sweep"):
        nbgpu.sweep("autoencoder", lr=[1e-4, 1e-3], launcher="hosts")
    with pytest.raises(nbgpu.ConfigError, match="does not go with a study"):
        nbgpu.study("autoencoder", bucket_mb=[1, 5], launcher="hosts")


@pytest.mark.parametrize("setting", ["nodes", "gpus_per_node"])
def test_a_setting_of_other_hosts_is_refused_without_them(setting: str) -> None:
    with pytest.raises(nbgpu.ConfigError, match="launcher"):
        ClusterConfig.checked(**{setting: 2})


@pytest.mark.parametrize("given", [{"ranks": 2}, {"spare": 1}, {"link": "10GbE"}])
def test_a_setting_of_one_host_is_refused_on_others(given: dict[str, object]) -> None:
    with pytest.raises(nbgpu.ConfigError, match="launcher"):
        ClusterConfig.checked(launcher="hosts", nodes=2, **given)


@pytest.mark.long
def test_a_gpu_of_another_host_is_not_taken_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts have no GPU here, and say that they have one that another cluster has."""
    gpu = Device("cuda", "NVIDIA", "GPU-of-a-test", 0, 80 * 2**30)
    transport = ChosenTransport(transports.candidates(ClusterConfig(), [gpu])[0])
    of_another = registry.new_entry(ClusterConfig(), (gpu,), transport, tmp_path)
    registry.claim(of_another)
    monkeypatch.setattr(joining, "devices_of", lambda hosts: [(hosts[0].name, gpu)])
    try:
        with pytest.raises(nbgpu.ClusterError, match=f"GPU 0.* {of_another.id}"):
            TwoHosts(tmp_path)
    finally:
        registry.remove(of_another)
