"""The readings of the devices for a page, and the choice that follows (NVML alone is a stand-in)."""

from __future__ import annotations

import threading
from pathlib import Path

import pretend_gpus
import pynvml
import pytest
from pretend_gpus import GIB, several

from nbgpu.client.host.device_cards import HostDevices
from nbgpu.config import ClusterConfig
from nbgpu.ui.controls.devices import DeviceControls
from nbgpu.ui.devices import reader as readers
from nbgpu.ui.devices.reader import DeviceReader

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBGPU_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(readers, "_LEAST_PERIOD_S", 0.0)


class Page:
    """What a page is shown."""

    def __init__(self) -> None:
        self.shown: list[HostDevices] = []
        self.problems: list[str] = []
        self.reader = DeviceReader(self.shown.append, self.problems.append)

    def read(self) -> None:
        self.reader.ask()
        assert self.reader.wait(PATIENCE_S)


def test_a_reading_is_made_for_each_time_it_is_asked_for_and_no_thread_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus.install(several(2), patch=monkeypatch)
    ends: list[None] = []
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: ends.append(None))
    page = Page()
    page.read()
    page.read()
    assert [len(devices.cards) for devices in page.shown] == [3, 3]
    assert "nbgpu-devices" not in [thread.name for thread in threading.enumerate()]
    assert not ends
    page.reader.rest()
    assert len(ends) == 1
    page.read()
    assert len(page.shown) == 3
    page.reader.rest()


def test_a_driver_that_hangs_holds_nobody_up_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus.install(several(1), patch=monkeypatch)
    answers = threading.Event()
    count = pynvml.nvmlDeviceGetCount

    def slow_count() -> int:
        answers.wait(PATIENCE_S)
        return int(count())

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", slow_count)
    page = Page()
    page.reader.ask()
    assert not page.reader.wait(0.05)
    page.reader.ask()
    assert page.problems == []
    monkeypatch.setattr(readers, "LATE_S", 0.0)
    page.reader.ask()
    assert page.problems[0].startswith("The driver of the GPUs has not answered since ")
    page.reader.rest()
    answers.set()
    assert page.reader.wait(PATIENCE_S)
    assert len(page.shown) == 1
    assert page.problems[-1] == ""


def test_an_error_that_nobody_foresaw_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus.install(several(1), patch=monkeypatch)
    page = Page()
    page.read()

    def broken() -> int:
        raise OSError("a broken pipe, say")

    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetCount", broken)
        page.read()
        assert page.problems[-1] == "The devices cannot be read: OSError: a broken pipe, say"
    page.read()
    assert page.problems[-1] == ""
    page.reader.rest()


def controls() -> DeviceControls:
    made = DeviceControls()
    assert made.gpus.wait(PATIENCE_S)
    return made


def again(made: DeviceControls) -> None:
    made.gpus._on_message(made.gpus, {"type": "read"}, [])
    assert made.gpus.wait(PATIENCE_S)


def test_the_choice_is_all_free_gpus_or_one_beside_other_people_until_somebody_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = pretend_gpus.install(several(4), patch=monkeypatch)
    made = controls()
    uuids = [gpu.uuid for gpu in gpus]
    assert made.values({}) == {"gpus": ",".join(uuids)}
    assert made.ranks.value == "4"
    gpus[3].used = 9 * GIB
    again(made)
    assert made.values({}) == {"gpus": uuids[0]}
    assert made.ranks.value == "1"
    gpus[0].used = 9 * GIB
    again(made)
    assert made.values({})["gpus"] == uuids[1]
    # A GPU that is in use can be shared by who wants that.
    made.gpus.wanted = [uuids[3], uuids[0]]
    assert made.values({})["gpus"] == f"{uuids[0]},{uuids[3]}"
    gpus[3].is_lost = True
    again(made)
    assert made.values({})["gpus"] == uuids[0]
    made.gpus.wanted = []
    assert made.values({}) == {"gpus": "none"}
    assert made.ranks.value == "2"
    made.gpus._on_message(made.gpus, {"type": "rest"}, [])


def test_a_number_of_ranks_that_was_typed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = pretend_gpus.install(several(4), patch=monkeypatch)
    made = controls()
    made.ranks.value = "8"
    made.gpus.wanted = [gpus[0].uuid]
    assert made.ranks.value == "8"
    assert ClusterConfig.checked(**made.values({"ranks": made.ranks.read()})).ranks == 8
    made.gpus._on_message(made.gpus, {"type": "rest"}, [])


def test_before_the_driver_has_answered_a_cluster_takes_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus.install(several(1), patch=monkeypatch)
    monkeypatch.setattr("nbgpu.ui.controls.device_picker._PATIENCE_S", 0.0)
    answers = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: answers.wait(PATIENCE_S))
    made = DeviceControls()
    assert made.values({}) == {"gpus": "auto"}
    answers.set()
    assert made.gpus.wait(PATIENCE_S)
    assert made.values({})["gpus"].startswith("GPU-")
    made.gpus._on_message(made.gpus, {"type": "rest"}, [])
