"""Which GPUs a cluster takes where others have some (NVML alone is a stand-in; the registry and the processes
are real)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pretend_gpus
import psutil
import pytest
from pretend_gpus import GIB, PretendGpu, several

from nbgpu.client.cluster.cluster import Cluster
from nbgpu.client.host import gpu_choice, registry
from nbgpu.client.host.device_cards import DeviceCards
from nbgpu.client.sweeps.starting import places
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError, NoFreeGpuError
from nbgpu.host import free_gpus
from nbgpu.machine.gpus import reservations
from nbgpu.machine.gpus.reservations import Reservations
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.protocol.records import Device


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def colleague() -> Iterator[int]:
    """The number of a process that stands for another person's."""
    with subprocess.Popen(["sleep", "120"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def ada(colleague: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """As `colleague`, and the system says that it is ada's."""
    uids, username = psutil.Process.uids, psutil.Process.username
    monkeypatch.setattr(
        psutil.Process, "uids", lambda p: uids(p)._replace(real=4242) if p.pid == colleague else uids(p)
    )
    monkeypatch.setattr(psutil.Process, "username", lambda p: "ada" if p.pid == colleague else username(p))
    return colleague


def busy(pid: int, gib: int = 20) -> PretendGpu:
    """A GPU on which a process holds memory and computes nothing."""
    return PretendGpu(load=0, used=gib * GIB, processes=[(pid, gib * GIB)])


def indices(**settings: object) -> list[int]:
    return [device.index for device in gpu_choice.choose(ClusterConfig.checked(**settings))]


def entry_of(chosen: tuple[Device, ...], **settings: object) -> registry.Entry:
    config = ClusterConfig.checked(**settings)
    transport = ChosenTransport(Transport("nccl", "nccl"))
    return registry.new_entry(config, chosen, transport, Path("/tmp/nbgpu-none"))


class Taken:
    """What clusters took."""

    def __init__(self) -> None:
        self.entries: list[registry.Entry] = []
        self.reservations: list[Reservations] = []

    def keep(self, entry: registry.Entry, reservations: Reservations) -> None:
        self.entries.append(entry)
        self.reservations.append(reservations)


@pytest.fixture
def taken() -> Iterator[Taken]:
    found = Taken()
    yield found
    for each in found.reservations:
        each.close()


def test_auto_takes_the_gpus_that_the_cards_show_as_free(ada: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unnamed = PretendGpu(used=3 * GIB)
    pretend_gpus.install([*several(1), busy(ada), *several(1), unnamed], patch=monkeypatch)
    assert indices() == [0, 2]
    with DeviceCards() as cards:
        free = [card.uuid for card in cards.read().cards if card.uuid and card.state == "free"]
    assert [device.uuid for device in gpu_choice.choose(ClusterConfig())] == free
    assert indices(gpus="all") == [0, 1, 2, 3]
    assert indices(gpus="1,3") == [1, 3]
    # Whoever shares takes what is there.
    assert indices(share_gpus=True) == [0, 1, 2, 3]
    assert indices(ranks=2) == [0, 2]
    assert places(ClusterConfig(ranks=1), None) == free
    with pytest.raises(NoFreeGpuError, match=r"gpus = 'auto': 2 of 4 GPUs are free, and 3 are needed"):
        indices(ranks=3)


def test_where_none_is_free_the_error_says_who_has_which_and_what_can_be_done(
    ada: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus.install([busy(ada, 60), PretendGpu(used=3 * GIB)], patch=monkeypatch)
    since = time.strftime("%H:%M on %d %B", time.localtime(psutil.Process(ada).create_time()))
    with pytest.raises(NoFreeGpuError) as refusal:
        Cluster()
    assert str(refusal.value).splitlines() == [
        "gpus = 'auto': none of 2 GPUs is free",
        f"GPU 0 NVIDIA H100 80GB HBM3: user ada (process {ada}, sleep) since {since} with 60.0 GiB; 20.0 GiB of "
        "80.0 GiB left",
        "GPU 1 NVIDIA H100 80GB HBM3: processes that the driver does not name, with 3.0 GiB; 77.0 GiB of 80.0 GiB "
        "left",
        "You can wait until there are as many: --wait (wait=True); share the memory and time of one: --gpus 0, or of "
        "all: --gpus all; take CPU ranks: --gpus none",
    ]


def test_the_best_linked_gpus_are_taken_and_then_those_with_the_most_memory(
    ada: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two GPUs each share a PCIe switch.
    gpus = pretend_gpus.install([busy(ada), *several(5)], has_nvlink=False, patch=monkeypatch)
    assert indices(gpus="free:2") == [2, 3]
    assert indices(gpus="free:2", ranks=4) == [2, 3, 2, 3]
    gpus[3].total = 40 * GIB
    assert indices(gpus="free:2") == [4, 5]
    assert indices(gpus="free:1") == [1]
    gpus[1].total = 40 * GIB
    assert indices(gpus="free:1") == [2]
    with pytest.raises(NoFreeGpuError, match=r"gpus = 'free:6': 5 of 6 GPUs are free, and 6 are needed"):
        indices(gpus="free:6")
    with pytest.raises(ConfigError, match=r"gpus = 'free:7': 6 GPUs are visible here\. Take 'free:6'"):
        indices(gpus="free:7")


def test_words_that_are_no_setting_are_refused() -> None:
    for gpus, why in {
        "free:0": "write 'free:2' for two free GPUs",
        "free:2,1": "write 'free:2'",
        "0,all": "'all' stands alone",
        "free": "'free' needs a number",
    }.items():
        with pytest.raises(ConfigError, match=why):
            ClusterConfig.checked(gpus=gpus)
    with pytest.raises(ConfigError, match="wait=True counts only with gpus='auto' or 'free:N'"):
        ClusterConfig.checked(gpus="0", wait=True)
    with pytest.raises(ConfigError, match="Slurm chooses the GPUs"):
        ClusterConfig.checked(gpus="free:2", launcher="slurm")
    with pytest.raises(ConfigError, match="share_gpus does not go with wait"):
        ClusterConfig.checked(share_gpus=True, wait=True)


def test_clusters_that_start_at_the_same_moment_get_other_gpus(
    monkeypatch: pytest.MonkeyPatch, taken: Taken
) -> None:
    pretend_gpus.install(several(3), patch=monkeypatch)
    config = ClusterConfig(gpus="free:1")
    # All three have chosen before any of them starts.
    chosen = [gpu_choice.choose(config) for _ in range(3)]
    assert {device.index for (device,) in chosen} == {0}

    def start(mine: tuple[Device, ...]) -> None:
        taking = gpu_choice.Taking(config, mine, time.monotonic(), print, None)
        taking.claim(entry_of(mine, gpus="free:1"), taken.keep)

    threads = [threading.Thread(target=start, args=(each,)) for each in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.devices[0].index for entry in taken.entries) == [0, 1, 2]
    with pytest.raises(
        NoFreeGpuError, match=rf"your cluster of .*\(cluster {taken.entries[0].id}|this notebook's own"
    ):
        gpu_choice.choose(config)


def test_a_gpu_that_was_taken_since_the_cluster_was_made_is_not_taken(
    ada: int, monkeypatch: pytest.MonkeyPatch, taken: Taken
) -> None:
    gpus = pretend_gpus.install(several(2), patch=monkeypatch)
    config = ClusterConfig(gpus="free:1")
    chosen = gpu_choice.choose(config)
    gpus[0].processes = [(ada, GIB)]
    long_ago_s = time.monotonic() - 60
    gpu_choice.Taking(config, chosen, long_ago_s, print, None).claim(entry_of(chosen), taken.keep)
    assert [device.index for device in taken.entries[0].devices] == [1]


RESERVES = """
import sys, time
from nbgpu.machine.gpus.reservations import Reservations
mine = Reservations()
print(mine.hold(sys.argv[1:]), flush=True)
time.sleep(120)
"""


def test_two_users_who_start_at_the_same_moment_get_other_gpus(
    monkeypatch: pytest.MonkeyPatch, taken: Taken
) -> None:
    gpus = pretend_gpus.install(several(2), patch=monkeypatch)
    config = ClusterConfig(gpus="free:1")
    chosen = gpu_choice.choose(config)
    command = [sys.executable, "-c", RESERVES, gpus[0].uuid]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        uids, username = psutil.Process.uids, psutil.Process.username
        monkeypatch.setattr(
            psutil.Process, "uids", lambda p: uids(p)._replace(real=4242) if p.pid == other.pid else uids(p)
        )
        monkeypatch.setattr(
            psutil.Process, "username", lambda p: "bea" if p.pid == other.pid else username(p)
        )
        # The other user's processes have not touched the GPU yet, and this cluster has just chosen it.
        gpu_choice.Taking(config, chosen, time.monotonic(), print, None).claim(entry_of(chosen), taken.keep)
        assert [device.index for device in taken.entries[0].devices] == [1]
        with DeviceCards() as cards:
            assert [card.holder for card in cards.read().cards[:1]] == ["user bea"]
        with pytest.raises(NoFreeGpuError, match=rf"GPU 0 .*: user bea \(process {other.pid}, python"):
            gpu_choice.choose(config)
        # A GPU that is named is shared with whoever has it.
        named = ClusterConfig(gpus="0")
        gpu_choice.Taking(named, chosen, 0.0, print, None).claim(entry_of(chosen, gpus="0"), taken.keep)
        other.kill()
    registry.remove(taken.entries[1])
    assert [device.index for device in gpu_choice.choose(config)] == [0]
    # A child of this process does not keep what its parent releases.
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    taken.reservations[0].close()
    still_held = reservations.holders()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(say)
    assert still_held == {}


def test_a_cluster_waits_until_a_gpu_is_free_and_says_for_what(
    ada: int, monkeypatch: pytest.MonkeyPatch, taken: Taken
) -> None:
    monkeypatch.setattr(gpu_choice, "_LOOK_PERIOD_S", 0.02)
    (gpu,) = pretend_gpus.install([busy(ada)], patch=monkeypatch)
    cluster = Cluster(wait=True)
    assert cluster.describe() == "GPUs that are waited for (gpus='auto')"
    told: list[str] = []

    def end() -> None:
        gpu.processes.clear()
        gpu.used = 0

    def tell(line: str) -> None:
        told.append(line)
        # The next look finds other memory in use, which is nothing new, and the one after it a free GPU.
        gpu.used += GIB
        threading.Timer(0.2, end).start()

    taking = gpu_choice.Taking(cluster.config, (), 0.0, tell, None)
    taking.claim(entry_of((), wait=True), taken.keep)
    assert len(told) == 2
    assert told[0].startswith(
        "waiting for free GPUs; Stop (Ctrl-C) ends the wait. gpus = 'auto': none of 1 GPU is free"
    )
    assert f"user ada (process {ada}, sleep)" in told[0]
    assert told[1].startswith("the GPUs are free, after ")
    assert [device.index for device in taken.entries[0].devices] == [0]


def test_a_wait_can_be_stopped(ada: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus.install([busy(ada)], patch=monkeypatch)
    cluster = Cluster(wait=True)
    stop = threading.Event()
    with pytest.raises(ClusterError, match="the wait for free GPUs was stopped, and no cluster was started"):
        cluster.start(tell=lambda _: stop.set(), stop=stop)
    assert registry.entries() == []
    main = threading.get_ident()
    with pytest.raises(KeyboardInterrupt):
        # As Stop and Ctrl-C do.
        cluster.start(tell=lambda _: threading.Timer(0.1, os.kill, (os.getpid(), 2)).start())
    assert main == threading.get_ident()
    assert registry.entries() == []


def test_a_cluster_that_grows_takes_free_gpus_beside_its_own(
    ada: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus.install([busy(ada), *several(3)], has_nvlink=False, patch=monkeypatch)
    config = ClusterConfig(gpus="free:1")
    (own,) = gpu_choice.choose(config)
    registry.claim(entry_of((own,)))
    auto = ClusterConfig()
    assert [device.index for device in gpu_choice.more(auto, (own,), 3)] == [1, 2, 3]
    with pytest.raises(NoFreeGpuError, match="ranks = 4: 2 of 3 GPUs are free, and 3 are needed"):
        gpu_choice.more(auto, (own,), 4)
    # With 'free:1' all ranks share the one GPU.
    assert [device.index for device in gpu_choice.more(config, (own,), 2)] == [1, 1]


def test_a_host_without_gpus_has_cpu_ranks_as_before() -> None:
    assert [device.kind for device in gpu_choice.choose(ClusterConfig())] == ["cpu", "cpu"]
    assert [device.kind for device in gpu_choice.choose(ClusterConfig(gpus="all", ranks=3))] == ["cpu"] * 3
    with pytest.raises(
        ConfigError, match=r"gpus = 'free:1': no GPU is visible here\. Take CPU ranks with 'none'"
    ):
        gpu_choice.choose(ClusterConfig(gpus="free:1"))


def test_a_plan_does_not_depend_on_who_has_the_gpus(ada: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = pretend_gpus.install([busy(ada), *several(1)], patch=monkeypatch)
    assert len(free_gpus.assumed("auto", None)) == 1
    assert len(free_gpus.assumed("auto", 2)) == 2
    gpus[1] = replace(busy(ada), uuid=gpus[1].uuid)
    assert len(free_gpus.assumed("auto", None)) == 2


def test_a_person_is_offered_one_gpu_where_others_use_the_machine(
    ada: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = pretend_gpus.install([*several(1), busy(ada), *several(2)], patch=monkeypatch)
    with DeviceCards() as cards:
        first = cards.read().proposed
        assert first == (gpus[0].uuid,)
        # A few GiB that come and go on free GPUs do not change the choice.
        gpus[0].used += GIB // 2
        assert cards.read().proposed == first
        gpus[0].processes = [(ada, GIB)]
        assert cards.read().proposed == (gpus[2].uuid,)
    own = pretend_gpus.install(several(3), patch=monkeypatch)
    with DeviceCards() as cards:
        assert cards.read().proposed == tuple(gpu.uuid for gpu in own)
