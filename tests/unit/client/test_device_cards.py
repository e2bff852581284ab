"""The cards of devices: what they say of GPUs (NVML alone is a stand-in) and of who has them (the registry
and the processes are real)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pretend_gpus
import psutil
import pynvml
import pytest
from pretend_gpus import GIB, PretendGpu, several, split_in

from nbgpu.client.host import registry
from nbgpu.client.host.device_cards import DeviceCard, DeviceCards, HostDevices
from nbgpu.config import ClusterConfig
from nbgpu.host import gpu_holders
from nbgpu.machine import devices
from nbgpu.machine.gpus import readings
from nbgpu.machine.processes import ProcessId
from nbgpu.machine.transports import ChosenTransport, Transport


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def driver_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the driver's, which a process that computes has open."""
    path = tmp_path / "nvidia0"
    path.touch()
    monkeypatch.setattr(gpu_holders, "DRIVER_FILES", str(path))
    return path


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for another notebook's kernel, or for its engine."""
    with subprocess.Popen(["sleep", "120"]) as process:
        yield process
        process.kill()


def read(gpus: list[PretendGpu], monkeypatch: pytest.MonkeyPatch, **settings: bool) -> HostDevices:
    pretend_gpus.install(gpus, patch=monkeypatch, **settings)
    with DeviceCards() as cards:
        return cards.read()


def gpu_cards(found: HostDevices) -> list[DeviceCard]:
    return [card for card in found.cards if card.kind == "gpu"]


@pytest.mark.parametrize("number", [1, 8, 16])
def test_each_gpu_has_a_card_and_all_are_free(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(several(number), monkeypatch)
    *gpus, processor = found.cards
    assert [card.title for card in gpus] == [f"GPU {index}" for index in range(number)]
    assert {(card.state, card.holder) for card in gpus} == {("free", "free")}
    assert gpus[0].name == "NVIDIA H100 80GB HBM3"
    # What the driver keeps for itself is in use by nobody.
    assert gpus[0].memory_in_words() == "0.4 of 80.0 GiB"
    assert gpus[0].heat_in_words() == "31 °C, 72 of 700 W"
    assert (processor.kind, processor.title) == ("cpu", "CPU")
    assert processor.total_bytes == psutil.virtual_memory().total
    assert "core" in processor.name


def test_without_a_gpu_there_is_the_processor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    with DeviceCards() as cards:
        found = cards.read()
        assert [card.title for card in found.cards] == ["CPU"]
        assert found.note == ""
        # The load is that since the reading before.
        assert found.cards[0].utilization_percent is None
        while cards.read().cards[0].utilization_percent is None:
            pass


def test_a_driver_that_cannot_be_used_is_said_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    with DeviceCards() as cards:
        found = cards.read()
    assert [card.title for card in found.cards] == ["CPU"]
    assert "RM has detected an NVML/RM version mismatch" in found.note
    assert "reboot" in found.note


def test_neighbours_are_hinted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_cards(read(several(8), monkeypatch))[0].neighbours == "NVLink to all others"
    assert gpu_cards(read(several(2), monkeypatch))[0].neighbours == "NVLink to GPU 1"
    apart = gpu_cards(read(several(4), monkeypatch, has_nvlink=False))
    assert [card.neighbours for card in apart] == [f"PCIe switch shared with GPU {i}" for i in (1, 0, 3, 2)]
    assert gpu_cards(read(several(1), monkeypatch))[0].neighbours == ""


def test_parts_of_a_gpu_are_told_apart_and_say_which_gpu_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, *parts = gpu_cards(read([*several(1), split_in(["1g.10gb", "1g.10gb"])], monkeypatch))
    assert whole.group == ""
    assert {part.group for part in parts} == {"GPU 1 NVIDIA A100-SXM4-80GB"}
    assert [part.title for part in parts] == ["MIG 1g.10gb device 0", "MIG 1g.10gb device 1"]
    assert parts[0].load_in_words() == "not reported"
    assert parts[0].neighbours == ""
    assert len({part.uuid for part in parts}) == 2


def test_what_a_gpu_does_not_report_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (card,) = gpu_cards(read([PretendGpu(load=None, celsius=None, milliwatts=None)], monkeypatch))
    assert (card.utilization_percent, card.power_w, card.temperature_c) == (None, None, None)
    assert card.load_in_words() == "not reported"
    assert card.heat_in_words() == ""
    assert card.state == "free"


def test_a_lost_gpu_is_said_on_its_card_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = pretend_gpus.install(several(3), patch=monkeypatch)
    with DeviceCards() as cards:
        before = gpu_cards(cards.read())
        gpus[1].is_lost = True
        lost = gpu_cards(cards.read())
        assert [card.title for card in lost] == ["GPU 0", "GPU 1", "GPU 2"]
        assert [card.state for card in lost] == ["free", "unreadable", "free"]
        assert (lost[1].uuid, lost[1].name) == (before[1].uuid, before[1].name)
        assert "GPU is lost" in lost[1].why
        assert not lost[1].is_choosable
        # A cluster on all GPUs takes those that are there.
        assert [device.index for device in devices.choose("all", None)] == [0, 2]
        gpus[1].is_lost = False
        assert [card.state for card in gpu_cards(cards.read())] == ["free"] * 3
    gpus[1].is_lost = True
    with DeviceCards() as cards:
        assert [card.name for card in gpu_cards(cards.read())] == [before[0].name, "", before[2].name]


def test_a_gpu_that_cannot_be_read_is_looked_for_with_a_new_start_of_nvml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readings, "_RESTART_PERIOD_S", 0.0)
    gpus = pretend_gpus.install(several(2), patch=monkeypatch)
    starts: list[None] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: starts.append(None))
    with DeviceCards() as cards:
        cards.read()
        cards.read()
        assert len(starts) == 1
        gpus[0].is_lost = True
        cards.read()
        cards.read()
        assert len(starts) == 2


def test_a_gpu_that_comes_or_goes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = pretend_gpus.install(several(2), patch=monkeypatch)
    with DeviceCards() as cards:
        assert len(gpu_cards(cards.read())) == 2
        last = gpus.pop()
        assert len(gpu_cards(cards.read())) == 1
        gpus.append(last)
        assert len(gpu_cards(cards.read())) == 2


def test_hidden_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    gpus = several(8)
    found = read(gpus, monkeypatch)
    assert [card.title for card in gpu_cards(found)] == ["GPU 2", "GPU 1"]
    assert found.note == "CUDA_VISIBLE_DEVICES=2,1 hides 6 GPUs of this machine."
    gpus[1].is_lost = gpus[5].is_lost = True
    found = read(gpus, monkeypatch)
    assert sorted((card.title, card.state) for card in gpu_cards(found)) == [
        ("GPU 1", "unreadable"),
        ("GPU 2", "free"),
    ]
    assert "hides 6 GPUs" in found.note


def cluster_on(index: int, owner: int, *, keep: bool = False, engine: int | None = None) -> registry.Entry:
    """A registered cluster of the notebook train.ipynb, whose kernel is the process `owner`."""
    entry = registry.new_entry(
        ClusterConfig(keep=keep),
        (devices.inventory()[index],),
        ChosenTransport(Transport("nccl", "nccl")),
        Path("/nonexistent/nbgpu-x"),
    )
    changed = entry.model_copy(
        update={
            "owner": ProcessId.of(owner),
            "notebook": "scans/train.ipynb",
            "engines": {0: ProcessId.of(engine or owner)},
        }
    )
    registry.claim(changed)
    return changed


def test_a_gpu_of_another_notebook_of_yours_names_it(
    monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    gpus = pretend_gpus.install(several(2), patch=monkeypatch)
    entry = cluster_on(1, other_process.pid)
    gpus[1].processes = [(other_process.pid, 3 * GIB)]
    with DeviceCards() as cards:
        found = cards.read()
    card = gpu_cards(found)[1]
    assert (card.state, card.holder) == ("yours", "train.ipynb (rank 0)")
    assert card.why == f"Your cluster of train.ipynb (rank 0) has it. To end that: nbgpu stop {entry.id}"
    assert not card.is_choosable
    assert [card.state for card in gpu_cards(found)] == ["free", "yours"]


def test_a_gpu_of_this_notebook_names_its_rank(
    monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    gpus = pretend_gpus.install(several(1), patch=monkeypatch)
    cluster_on(0, os.getpid(), engine=other_process.pid)
    # In a container the driver has the numbers of the host, which mean nobody here.
    gpus[0].processes = [(2**22 + 5, 3 * GIB)]
    with DeviceCards() as cards:
        (card,) = gpu_cards(cards.read())
    assert (card.state, card.holder, card.why) == ("this notebook", "this notebook (rank 0)", "")


def test_cpu_ranks_stand_on_the_processors_card(
    monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    pretend_gpus.install(several(1), patch=monkeypatch)
    transport = ChosenTransport(Transport("gloo", "gloo"))
    pair = (devices.cpu(0), devices.cpu(1))
    entry = registry.new_entry(ClusterConfig(gpus="none"), pair, transport, Path("/nonexistent/nbgpu-x"))
    other = {"id": "abcdef", "owner": ProcessId.of(other_process.pid), "notebook": "scans/train.ipynb"}
    with DeviceCards() as cards:
        registry.claim(entry.model_copy(update=other))
        processor = cards.read().cards[-1]
        assert (processor.state, processor.holder) == ("free", "train.ipynb (ranks 0, 1)")
        registry.claim(entry)
        processor = cards.read().cards[-1]
    assert processor.state == "this notebook"
    for words in ("this notebook (ranks 0, 1)", "train.ipynb (ranks 0, 1)"):
        assert words in processor.holder


def test_a_left_over_cluster_says_how_to_free_its_gpu(
    monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    pretend_gpus.install(several(1), patch=monkeypatch)
    with subprocess.Popen(["sleep", "120"]) as kernel:
        entry = cluster_on(0, kernel.pid, engine=other_process.pid)
        kernel.kill()
    with DeviceCards() as cards:
        (card,) = gpu_cards(cards.read())
    assert card.state == "yours"
    assert (
        card.why
        == f"Left over by train.ipynb (rank 0), whose kernel is gone. To free it: nbgpu stop {entry.id}"
    )


def test_a_process_of_another_user_is_named_and_the_gpu_can_be_shared(
    monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    (card,) = gpu_cards(
        read([PretendGpu(used=12 * GIB, processes=[(other_process.pid, 12 * GIB)])], monkeypatch)
    )
    name = psutil.Process().username()
    assert (card.state, card.holder, card.is_choosable) == ("others", f"user {name}", True)
    assert card.why == (
        f"In use, with 12.0 GiB, by user {name} (process {other_process.pid}, sleep). You would share its memory and "
        "its time."
    )


def test_your_own_process_is_known_by_the_drivers_files_that_it_has_open(
    monkeypatch: pytest.MonkeyPatch, driver_file: Path
) -> None:
    command = [sys.executable, "-c", f"f = open({str(driver_file)!r}); print(flush=True); input()"]
    environment = {**os.environ, "JPY_SESSION_NAME": "/home/ada/plain.ipynb"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (card,) = gpu_cards(read([PretendGpu(processes=[(process.pid, GIB)])], monkeypatch))
        process.kill()
    assert (card.state, card.holder, card.is_choosable) == ("others", "plain.ipynb", True)
    assert f"your notebook plain.ipynb (process {process.pid})" in card.why


def test_a_process_that_only_has_the_number_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, driver_file: Path, other_process: subprocess.Popen[bytes]
) -> None:
    (card,) = gpu_cards(read([PretendGpu(processes=[(other_process.pid, GIB)])], monkeypatch))
    assert (card.state, card.holder) == ("others", "another process")
    assert "a process that cannot be seen from here" in card.why


def test_memory_in_use_by_nobody_that_is_named_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    (card,) = gpu_cards(read([PretendGpu(used=9 * GIB)], monkeypatch))
    assert (card.state, card.holder) == ("others", "in use")
    assert "9.0 GiB" in card.why


def test_a_desktop_does_not_take_the_gpu_on_which_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = [(4_000_001, 2 * GIB), (4_000_002, GIB // 2)]
    (card,) = gpu_cards(read([PretendGpu(used=3 * GIB, desktop=screen)], monkeypatch))
    assert card.state == "free"
    (card,) = gpu_cards(read([PretendGpu(used=9 * GIB, desktop=screen)], monkeypatch))
    assert "In use, with 6.5 GiB, by processes that the driver does not name." in card.why


def test_a_registry_that_cannot_be_used_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path / "file" / "below"))
    found = read(several(2), monkeypatch)
    assert len(gpu_cards(found)) == 2
    assert "Which of your clusters has which GPU is not known" in found.note


def test_the_json_form_has_numbers_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(json.dumps(read([PretendGpu(load=37)], monkeypatch).as_json()))
    card = found["devices"][0]
    assert (card["memory"], card["load"], card["heat"]) == (
        "0.4 of 80.0 GiB",
        "37 % busy",
        "31 °C, 72 of 700 W",
    )
    assert (card["total_bytes"], card["utilization_percent"], card["is_choosable"]) == (80 * GIB, 37, True)
