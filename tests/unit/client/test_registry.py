"""Who has which GPU. NVML's devices are a stand-in here; the processes that hold them are real."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.client.host import ps, registry
from nbgpu.client.host.registry import Entry
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.rank_changes import RankChanges
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError
from nbgpu.machine import processes
from nbgpu.machine.processes import EngineProcess, ProcessId
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.protocol.records import Device

GPUS = tuple(Device("cuda", f"Pretend {i}", f"GPU-{i}{i}{i}{i}", i, 2**36) for i in range(3))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "scans/train.ipynb")


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the engine of another notebook's cluster."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def cluster_on(*gpus: Device, share_gpus: bool = False, engine_pid: int | None = None) -> Entry:
    config = ClusterConfig(share_gpus=share_gpus)
    entry = registry.new_entry(
        config, gpus, ChosenTransport(Transport("nccl", "nccl")), Path("/nonexistent/nbgpu-x")
    )
    engines = {} if engine_pid is None else {0: ProcessId.of(engine_pid)}
    return entry.model_copy(update={"engines": engines})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_trusted() -> None:
    registry.claim(cluster_on(GPUS[0]))
    os.chown(registry.folder(), 65534, 65534)
    with pytest.raises(ClusterError, match=r"belongs to another user.*NBGPU_STATE_DIR"):
        registry.entries()


def test_who_has_a_gpu_is_named_with_how_to_go_on(engine: subprocess.Popen[bytes]) -> None:
    holder = cluster_on(GPUS[0], GPUS[1], engine_pid=engine.pid)
    registry.claim(holder)
    registry.claim(cluster_on(GPUS[2]))
    with pytest.raises(ClusterError) as caught:
        registry.claim(cluster_on(GPUS[1], GPUS[2]))
    first, second, way_out = str(caught.value).splitlines()
    assert first.startswith(
        f"GPU 1 Pretend 1 (GPU-1111) is in use by scans/train.ipynb (cluster {holder.id}, process {holder.owner.pid}) "
        "since "
    )
    assert first.endswith(f"To end that: nbgpu stop {holder.id}")
    assert second.startswith("GPU 2 Pretend 2")
    assert "--gpus" in way_out
    assert "--share-gpus" in way_out
    registry.claim(cluster_on(GPUS[1], share_gpus=True))
    assert len(registry.entries()) == 3


def test_a_lease_ends_with_the_processes_also_when_they_are_killed(engine: subprocess.Popen[bytes]) -> None:
    registry.claim(cluster_on(GPUS[0], engine_pid=engine.pid))
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    registry.claim(cluster_on(GPUS[0]))
    assert len(registry.entries()) == 1


def test_cpu_ranks_need_no_lease() -> None:
    cpu = Device("cpu", "Pretend", "", 0, 2**36)
    registry.claim(cluster_on(cpu))
    registry.claim(cluster_on(cpu))
    assert len(registry.entries()) == 2


_TAKE = """
import sys
from pathlib import Path
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.client.host import registry
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.rank_changes import RankChanges
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError
from nbgpu.protocol.records import Device
entry = registry.new_entry(ClusterConfig(), (Device("cuda", "Pretend", "GPU-0000", 0, 1),), ChosenTransport(Transport("nccl", "nccl")), Path("/none/nbgpu-x"))
print("ready", flush=True)
sys.stdin.readline()
try:
    registry.claim(entry)
    print("taken", flush=True)
except ClusterError:
    print("refused", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_of_many_that_want_a_gpu_at_once_one_gets_it() -> None:
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", _TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]

    def line_of(taker: subprocess.Popen[str]) -> str:
        assert taker.stdout is not None
        return taker.stdout.readline().strip()

    def tell(taker: subprocess.Popen[str]) -> None:
        assert taker.stdin is not None
        taker.stdin.write("\n")
        taker.stdin.flush()

    assert {line_of(taker) for taker in takers} == {"ready"}
    at_once = [threading.Thread(target=tell, args=(taker,)) for taker in takers]
    for thread in at_once:
        thread.start()
    answers = [line_of(taker) for taker in takers]
    for thread in at_once:
        thread.join()
    for taker in takers:
        tell(taker)
        taker.communicate(timeout=30)
    assert sorted(answers) == ["refused"] * 5 + ["taken"]


def test_what_is_noted_of_a_cluster_comes_back_as_it_was(engine: subprocess.Popen[bytes]) -> None:
    noted = cluster_on(*GPUS, engine_pid=engine.pid).model_copy(
        update={
            "assignment": RankAssignment({0: 1}, {0: _here(engine)}, generation=3, is_whole=False),
            "run": Path("/runs/a"),
            "leaders": {"controller": ProcessId(1, 2)},
        }
    )
    registry.claim(noted)
    assert registry.entries() == [noted]
    registry.remove(noted)
    registry.remove(noted)
    assert registry.entries() == []


def _here(engine: subprocess.Popen[bytes]) -> EngineProcess:
    return EngineProcess(platform.node(), engine.pid)


def test_a_cluster_of_another_version_is_listed_and_holds_its_gpus(engine: subprocess.Popen[bytes]) -> None:
    """That version had a setting by another name."""
    entry = cluster_on(GPUS[0], engine_pid=engine.pid)
    written = json.loads(entry.model_dump_json()) | {"version": "0.0.7"}
    written["config"] |= {"keep": True, "number_of_spares": 2}
    # Its notebook is gone.
    written["owner"] = [written["owner"][0], 0]
    written["leaders"] = {"controller": json.loads(entry.model_dump_json())["engines"]["0"]}
    (registry.folder() / f"{entry.id}.json").write_text(json.dumps(written))

    (line,) = ps.table().splitlines()[1:]
    assert line.split()[0] == entry.id
    assert "GPU 0" in line
    assert " kept " in line
    with pytest.raises(ClusterError, match=f"GPU 0 .* is in use by .* nbgpu stop {entry.id}"):
        registry.require_free([GPUS[0]])
    with pytest.raises(ClusterError) as caught:
        registry.take_over(None)
    assert "was started by nbgpu 0.0.7" in str(caught.value)
    assert "config.number_of_spares" in str(caught.value)
    assert f"nbgpu stop {entry.id}" in str(caught.value)

    (told,) = ps.stop([entry.id])
    assert str(engine.pid) in told
    assert engine.wait(30) < 0
    assert ps.table() == "no clusters"


def test_a_process_that_does_not_end_is_named(
    engine: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in a driver, which nobody can kill."""
    monkeypatch.setattr(ProcessId, "send", lambda *_: None)
    monkeypatch.setattr(processes, "_TERM_PATIENCE_S", 0.1)
    monkeypatch.setattr(processes, "_KILL_PATIENCE_S", 0.1)
    with pytest.raises(ClusterError, match=rf"process\(es\) {engine.pid} did not end when they were killed"):
        processes.end([ProcessId.of(engine.pid)])


def test_a_resize_that_fails_before_the_ranks_are_asked_gives_its_gpus_back() -> None:
    config = ClusterConfig()
    transport = ChosenTransport(Transport("nccl", "nccl"))
    ranks: Any = SimpleNamespace(devices=GPUS[:1], assignment=RankAssignment(), pids_here={})
    entry = registry.claim(cluster_on(GPUS[0]))
    pool: Any = SimpleNamespace(
        mark_with_ranks=lambda _: None,
        processes=SimpleNamespace(folder=entry.folder, leaders={}),
        launcher=SimpleNamespace(job="", record=dict),
        members=(),
        most_ranks=None,
    )
    state = ClusterState(config, pool, GPUS[:1], transport, entry=entry, started_ranks=ranks)
    questions: Any = _UnreachableQuestions()
    state.listening.append(questions)
    with pytest.raises(ClusterError, match="does not answer"):
        RankChanges(state).change_size(config, GPUS[:2], transport.transport, ())
    registry.claim(cluster_on(GPUS[1]))


class _UnreachableQuestions:
    """The questions of a host that is lost."""

    def close(self) -> None:
        raise ClusterError("the host does not answer")
