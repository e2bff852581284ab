"""Each rank is bound to the cores of its GPU's NUMA node. NVML and /sys are stand-ins here;
tests/cluster/test_cores_of_ranks.py binds real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend_gpus
import pytest

from nbgpu.client.engines import rank_specs
from nbgpu.client.engines.host_pool import Place
from nbgpu.config import ClusterConfig
from nbgpu.host import gpu_checks
from nbgpu.machine import cgroups, devices, numa
from nbgpu.machine.transports import Transport
from nbgpu.planning import workers
from nbgpu.protocol.meeting import MeetingPlace

FIRST, SECOND = "0-3,8-11", "4-7,12-15"


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with two nodes of eight cores, GPUs 0 to 2 at the first, GPU 3 at the second, and no quota."""
    for node, cores in enumerate([FIRST, SECOND, ""]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    gpus = [pretend_gpus.PretendGpu(bus_id=f"00000000:{index}A:00.0") for index in range(4)]
    for index in range(4):
        (tmp_path / f"0000:{index}a:00.0").mkdir()
        (tmp_path / f"0000:{index}a:00.0" / "numa_node").write_text(f"{index // 3}\n")
    pretend_gpus.install(gpus, patch=monkeypatch)
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(numa, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "no quota")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for name in ("CUDA_VISIBLE_DEVICES", *numa._OPENMP_AFFINITY):
        monkeypatch.delenv(name, raising=False)


def specs_of(monkeypatch: pytest.MonkeyPatch, config: ClusterConfig) -> list[dict[str, Any]]:
    monkeypatch.setattr(MeetingPlace, "read", lambda _: SimpleNamespace(address=""))
    place = Place("here", "", "", "", None, numa.bindable())
    pool: Any = SimpleNamespace(processes=SimpleNamespace(meeting_file=None), place=lambda _: place)
    chosen = devices.choose(config.named_gpus, config.ranks)
    return rank_specs.rank_specs(config, chosen, Transport("gloo", "gloo"), pool, lambda _: "here")


def test_each_rank_gets_its_gpus_node_and_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    made = specs_of(monkeypatch, ClusterConfig())
    assert [spec["binding"] for spec in made] == [(FIRST, 3)] * 3 + [(SECOND, 1)]
    # The sixteen cores divided by four, and the eight of the first node divided by three.
    assert [spec["threads"] for spec in made] == [2, 2, 2, 4]
    assert [spec["threads"] for spec in specs_of(monkeypatch, ClusterConfig(threads_per_rank=5))] == [5] * 4
    shared = specs_of(monkeypatch, ClusterConfig(gpus="3", ranks=4))
    assert {(spec["binding"], spec["threads"]) for spec in shared} == {((SECOND, 4), 2)}


def test_nothing_is_bound_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = specs_of(monkeypatch, ClusterConfig(bind_cores=False))
    assert [(spec["binding"], spec["threads"]) for spec in made] == [(numa.NOT_BOUND, 4)] * 4
    assert {spec["binding"] for spec in specs_of(monkeypatch, ClusterConfig(gpus="none"))} == {numa.NOT_BOUND}


@pytest.mark.parametrize(
    ("number", "variable", "reason"),
    [
        (8, "", "this process was given 8 of the host's 16 cores"),
        (16, "OMP_PLACES", "OMP_PLACES is set"),
    ],
)
def test_a_persons_own_cores_stay(
    number: int, variable: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(number)))
    if variable:
        monkeypatch.setenv(variable, "cores")
    assert {spec["binding"] for spec in specs_of(monkeypatch, ClusterConfig())} == {numa.NOT_BOUND}
    assert told().endswith(f"Ranks are not bound: {reason}")


def told() -> str:
    (finding,) = [finding for finding in gpu_checks.gpus(None, {}) if finding.check == "NUMA"]
    assert finding.verdict == "ok"
    return finding.text


def test_doctor_names_the_nodes(tmp_path: Path) -> None:
    near = f"GPUs 0, 1, 2 at node 0 (cores {FIRST}); GPU 3 at node 1 (cores {SECOND})"
    assert told() == f"{near}. Ranks are bound to these cores; bind_cores=False leaves that"
    (tmp_path / "0000:3a:00.0" / "numa_node").write_text("-1\n")  # as in many virtual machines
    assert "GPU 3 at a node that the host does not name" in told()
    assert [device.numa_node for device in devices.inventory()] == [0, 0, 0, None]
    (tmp_path / "node1" / "cpulist").unlink()
    (tmp_path / "node1").rmdir()
    assert told() == "the host has one node"
    assert numa.bindable() == {}


def test_loader_workers_share_the_nodes_cores_and_the_hosts_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(numa, "_bound", numa.Binding(FIRST, 2))
    host = workers.this_host(4)
    assert (host.num_cores, host.num_ranks) == (8, 2)
    monkeypatch.setattr(workers, "cpu_quota", lambda: 6.5)
    host = workers.this_host(4)
    assert (host.num_cores, host.num_ranks) == (6, 4)
