"""What the sidebar says of a cluster whose ranks are on other hosts, where only the run's folder is here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.client.host import registry
from nbgpu.config import ClusterConfig
from nbgpu.machine.processes import EngineProcess
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.protocol.hosts import JoinedHost
from nbgpu.protocol.records import Device, RunInfo
from nbgpu.run_folder import names
from nbgpu.run_folder.rank_files import record_path
from nbgpu.server.overview import Overview

CPU = Device("cpu", "a processor", "", 0, 2**30)


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path / "state"))


def cluster_on(tmp_path: Path, run: Path | None, *hosts: str) -> None:
    """List a running cluster with one rank on each of these hosts."""
    config = ClusterConfig(launcher="hosts", nodes=2, gpus_per_node=1, gpus="none")
    transport = ChosenTransport(Transport("gloo", "gloo"))
    entry = registry.new_entry(config, (CPU,) * len(hosts), transport, tmp_path)
    assignment = RankAssignment(
        engines={rank: rank for rank in range(len(hosts))},
        processes={rank: EngineProcess(host, 1000 + rank) for rank, host in enumerate(hosts)},
    )
    known = {
        "id": "abc123",
        "leaders": {"controller": entry.owner},
        "run": run,
        "assignment": assignment,
        "hosts": tuple(JoinedHost(host, 2000 + number, {}) for number, host in enumerate(hosts)),
    }
    registry.update(entry.model_copy(update=known))


def told() -> Any:
    overview = Overview().read(with_devices=False)
    assert overview["problems"] == []
    (cluster,) = overview["clusters"]
    return cluster


def write_run(folder: Path, *steps: int) -> None:
    """A run that trains, with one rank for each of the steps."""
    folder.mkdir(exist_ok=True)
    info = RunInfo("run", "autoencoder", (CPU,) * len(steps), "gloo", 100, 10, 1, len(steps), 1.0)
    (folder / names.INFO).write_text(json.dumps(asdict(info)))
    for rank, step in enumerate(steps):
        line = {"seq": 0, "time_s": 1.0, "step": step, "kind": "state", "text": "training", "detail": {}}
        record_path(folder, rank).write_text(json.dumps(line) + "\n")


def test_ranks_without_a_run_are_neither_starting_nor_in_a_cell(tmp_path: Path) -> None:
    cluster_on(tmp_path, None, "n1", "n2")
    assert told()["state"] == "running"
    assert told()["ranks"] == [
        {"rank": 0, "device": "n1 CPU", "words": "not known", "sign": "unknown"},
        {"rank": 1, "device": "n2 CPU", "words": "not known", "sign": "unknown"},
    ]


def test_a_run_is_told_of_as_its_ranks_write(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 7, 8)
    cluster_on(tmp_path, tmp_path / "run", "n1", "n2")
    cluster = told()
    assert [rank["words"] for rank in cluster["ranks"]] == ["step 7", "step 8"]
    assert (cluster["run"]["state"], cluster["run"]["is_over"]) == ("training", False)
    assert cluster["run"]["progress"]["step"] == 7


def test_a_run_that_goes_on_without_a_host_is_that_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 7, 8)
    cluster_on(tmp_path, tmp_path / "run", "n1", "n2")
    overview = Overview()
    (cluster,) = overview.read(with_devices=False)["clusters"]
    assert cluster["run"]["progress"]["step"] == 7
    write_run(tmp_path / "run", 30)
    cluster_on(tmp_path, tmp_path / "run", "n2")
    (cluster,) = overview.read(with_devices=False)["clusters"]
    assert [rank["words"] for rank in cluster["ranks"]] == ["step 30"]
    assert cluster["run"]["progress"]["step"] == 30
