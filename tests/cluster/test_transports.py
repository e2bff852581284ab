"""A way to talk that does not work is stepped down from, aloud. What fails here really fails: an interface
that does not exist, and NCCL in a torch that is built without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretend_gpus
import pytest
import torch.distributed as dist
from rows import row

import nbgpu
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.host import registry
from nbgpu.host import host_checks
from nbgpu.machine import devices
from nbgpu.machine.transports import NCCL_SAFE, SINGLE, Transport

SETTINGS = {"data": "phantoms", "patch_size": 16, "num_phantoms": 16, "steps": 2, "val_every": 0}


@contextmanager
def stopping(cluster: nbgpu.Cluster) -> Iterator[None]:
    try:
        yield
    finally:
        cluster.stop()


def interface_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names an interface for gloo that is there when the cluster is about to start, and gone when its ranks
    want it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nbgpu-none")
    monkeypatch.setattr(host_checks, "interfaces", lambda: ["lo", "nbgpu-none"])


@row("`GLOO_SOCKET_IFNAME` names no interface", "the start is refused before it begins", bound_s=None)
def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nbgpu-none")
    cluster = nbgpu.Cluster(gpus="none", ranks=2)
    with pytest.raises(
        nbgpu.ConfigError, match=r"there is no interface nbgpu-none.* name one of .*lo"
    ) as refused:
        cluster.start()
    assert "GLOO_SOCKET_IFNAME" in str(refused.value)
    assert not registry.entries()
    assert not cluster.running


@pytest.mark.long
def test_down_to_a_rank_alone_and_up_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interface_that_goes(monkeypatch)
    cluster = nbgpu.Cluster(gpus="none", ranks=2, memory_limit="4GiB")
    with pytest.warns(UserWarning, match=r"one rank, alone, .*\n?gloo failed: .*nbgpu-none"):
        cluster.start()
    with stopping(cluster):
        assert cluster.describe() == "no GPU used: 1 CPU rank, single (gloo failed)"
        assert (cluster.world_size, cluster.parts.state.transport.name, cluster.parts.state.backend) == (
            1,
            SINGLE,
            "gloo",
        )
        assert cluster.status().startswith(cluster.describe())
        said = cluster.execute("x = torch.ones(3); dist.all_reduce(x); print(world_size, x.tolist())")
        assert said == {0: "1 [1.0, 1.0, 1.0]\n"}
        run = cluster.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path)).wait(400)
        assert json.loads((run.folder / "run_info.json").read_text())["transport"] == SINGLE
        assert run.info.transport == SINGLE
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        cluster.restart()
        assert cluster.describe() == "no GPU used: 2 CPU ranks, gloo"
        assert cluster.execute("print(world_size)") == {0: "2\n", 1: "2\n"}


def test_a_backend_that_is_named_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    interface_that_goes(monkeypatch)
    cluster = nbgpu.Cluster(gpus="none", ranks=2, backend="gloo")
    with pytest.raises(
        nbgpu.ClusterError, match=r"(?s)cannot communicate.*gloo: ranks? .*nbgpu-none.*backend='auto' tries"
    ):
        cluster.start()
    assert not cluster.running


@pytest.mark.long
@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL, which CPU ranks would not use")
def test_two_ways_that_fail_and_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of a way that failed are gone: what it left in them is nobody's concern."""
    ways = (Transport("nccl", "nccl"), Transport(NCCL_SAFE, "nccl"), Transport("gloo", "gloo"))
    monkeypatch.setattr("nbgpu.machine.transports.candidates", lambda config, chosen: ways)
    cluster = nbgpu.Cluster(gpus="none", ranks=2, spare=1)
    with pytest.warns(UserWarning, match=r"(?s)nccl failed: .*nccl in safe mode failed: "):
        cluster.start()
    with stopping(cluster):
        assert cluster.describe() == "no GPU used: 2 CPU ranks, gloo (nccl and nccl in safe mode failed)"
        said = cluster.execute("import os\nx = torch.ones(1); dist.all_reduce(x); print(int(x), os.getpid())")
        assert {rank: text.split() for rank, text in said.items()} == {
            rank: ["2", str(pid)] for rank, pid in cluster.pids.items()
        }
        assert cluster.execute("print(os.environ.get('NCCL_P2P_DISABLE'))") == {0: "None\n", 1: "None\n"}


@pytest.mark.long
@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL, which CPU ranks would not use")
def test_a_gpu_that_hangs_after_a_failed_try_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML is a stand-in, and the ranks are on the CPU under the names of its GPUs."""
    gpus = pretend_gpus.install(pretend_gpus.several(3), patch=monkeypatch)
    on_them = tuple(replace(devices.cpu(n), uuid=gpu.uuid) for n, gpu in enumerate(gpus))
    ways = (Transport("nccl", "nccl"), Transport("gloo", "gloo"))
    monkeypatch.setattr("nbgpu.machine.transports.candidates", lambda config, chosen: ways)
    monkeypatch.setattr("nbgpu.client.host.gpu_choice.choose", lambda config: on_them)
    monkeypatch.setattr("nbgpu.machine.gpus.readings._LOAD_PATIENCE_S", 0.5)
    for gpu in gpus:
        gpu.processes = [(os.getpid(), 0)]
    end = Ranks.end

    def end_and_hang(self: Ranks, *args: Any) -> None:
        end(self, *args)
        for gpu in gpus:
            gpu.processes = []
        gpus[1].load = 100

    monkeypatch.setattr(Ranks, "end", end_and_hang)
    cluster = nbgpu.Cluster(gpus="none", ranks=3)
    with pytest.warns(UserWarning, match=r"nccl failed: ") as told:
        cluster.start()
    with stopping(cluster):
        hangs = f"(?s)GPU 1 \\({gpus[1].uuid}\\) still computes.*without it, with 2 ranks.*gpu-reset"
        assert re.search(hangs, str(told[0].message))
        assert cluster.devices == (on_them[0], on_them[2])
        assert cluster.ranks.group_is_whole
        assert cluster.describe() == "no GPU used: 2 CPU ranks, gloo (nccl failed)"
        said = cluster.execute("x = torch.ones(1); dist.all_reduce(x); print(int(x), world_size)")
        assert said == {0: "2 2\n", 1: "2 2\n"}


def test_safe_mode_sets_what_nobody_has_set() -> None:
    code = "import os, json; from nbgpu.engine.group import safe_nccl; print(json.dumps([safe_nccl.apply(), dict(os.environ)]))"
    environment = {"PATH": "", "NCCL_IB_DISABLE": "0", "PYTHONPATH": str(Path(nbgpu.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=180
    )
    told, now = json.loads(done.stdout)
    assert now["NCCL_IB_DISABLE"] == "0"
    assert {"NCCL_P2P_DISABLE=1", "NCCL_CUMEM_HOST_ENABLE=0", "NCCL_SOCKET_IFNAME=lo"} <= set(told)
    assert all(f"{name}={now[name]}" in told for name in now if name.startswith("NCCL_P"))
    assert not [line for line in told if line.startswith("NCCL_IB")]


@pytest.mark.gpu
def test_safe_mode_on_gpus() -> None:
    with nbgpu.Cluster(backend="nccl", nccl_safe=True) as cluster:
        assert "nccl in safe mode (with NCCL_P2P_DISABLE=1" in cluster.describe()
        said = cluster.execute("x = torch.ones(1, device=device); dist.all_reduce(x); print(int(x))")
        assert said[0] == f"{cluster.world_size}\n"
