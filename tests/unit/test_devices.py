"""Which device each rank gets. NVML alone is a stand-in here: it is the one thing that needs the hardware."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from nbgpu import devices
from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError

UUIDS = ("GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-cccc3333-0000")


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with three GPUs of 80 GiB."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(UUIDS),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"Pretend {handle}",
        "nvmlDeviceGetUUID": lambda handle: UUIDS[handle].encode(),  # older bindings answer in bytes
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * 2**30),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)


def chosen_uuids(gpus: str, ranks: int | None = None) -> list[str]:
    return [d.uuid for d in devices.choose(gpus, ranks)]


@pytest.mark.usefixtures("no_driver")
def test_no_driver_means_two_cpu_ranks() -> None:
    assert devices.inventory() == ()
    found = devices.choose("auto", None)
    assert [(d.kind, d.label()) for d in found] == [("cpu", "CPU rank 0"), ("cpu", "CPU rank 1")]
    assert found[0].memory_bytes > 2**28
    assert len(devices.choose("auto", 5)) == 5
    with pytest.raises(ConfigError, match="GPUs: none on this machine"):
        devices.choose("0", None)


@pytest.mark.usefixtures("three_gpus")
def test_gpus_are_chosen_by_number_and_uuid_in_the_order_asked_for() -> None:
    assert chosen_uuids("auto") == list(UUIDS)
    assert chosen_uuids("2,0") == [UUIDS[2], UUIDS[0]]
    assert chosen_uuids(f"{UUIDS[1]}, 0") == [UUIDS[1], UUIDS[0]]
    assert chosen_uuids("GPU-cccc") == [UUIDS[2]]
    assert devices.choose("auto", None)[1].label() == "GPU 1 Pretend 1"
    assert [d.kind for d in devices.choose("none", 1)] == ["cpu"]


@pytest.mark.usefixtures("three_gpus")
def test_an_unknown_gpu_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"there is no GPU 7, GPU-dddd\. GPUs: 0 = Pretend 0 GPU-aaaa1111"):
        devices.choose("0,7,GPU-dddd", None)


@pytest.mark.usefixtures("three_gpus")
def test_cuda_visible_devices_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert chosen_uuids("auto") == [UUIDS[2], UUIDS[1]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.inventory() == ()


@pytest.mark.usefixtures("three_gpus")
def test_torchs_names_count_the_chosen_gpus_and_ranks_may_share_one() -> None:
    chosen = devices.choose("2,0", 3)
    assert [devices.torch_name(d, chosen) for d in chosen] == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices.torch_name(devices.cpu(0), chosen) == "cpu"


@pytest.mark.usefixtures("three_gpus")
def test_nccl_only_where_each_rank_has_a_gpu_of_its_own() -> None:
    assert devices.backend(ClusterConfig(), devices.choose("auto", None)) == "nccl"
    assert devices.backend(ClusterConfig(), devices.choose("0", 2)) == "gloo"
    assert devices.backend(ClusterConfig(), devices.choose("none", 2)) == "gloo"
    assert devices.backend(ClusterConfig(backend="gloo"), devices.choose("auto", None)) == "gloo"
    with pytest.raises(ConfigError, match=r"2 rank\(s\) have 1 GPU\(s\)"):
        devices.backend(ClusterConfig(backend="nccl"), devices.choose("0", 2))
