"""Which device each rank gets. NVML alone is a stand-in here: it is the one thing that needs the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

import nbgpu
from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError
from nbgpu.machine import devices, transports
from nbgpu.protocol.records import Device

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
        "nvmlDeviceGetMigMode": lambda handle: [pynvml.NVML_DEVICE_MIG_DISABLE] * 2,
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
    found = devices.choose("all", None)
    assert [(d.kind, d.label()) for d in found] == [("cpu", "CPU rank 0"), ("cpu", "CPU rank 1")]
    assert found[0].memory_bytes > 2**28
    assert len(devices.choose("all", 5)) == 5
    with pytest.raises(ConfigError, match="GPUs: none on this machine"):
        devices.choose("0", None)


@pytest.mark.usefixtures("three_gpus")
def test_gpus_are_chosen_by_number_and_uuid_in_the_order_asked_for() -> None:
    assert chosen_uuids("all") == list(UUIDS)
    assert chosen_uuids("2,0") == [UUIDS[2], UUIDS[0]]
    assert chosen_uuids(f"{UUIDS[1]}, 0") == [UUIDS[1], UUIDS[0]]
    assert chosen_uuids("GPU-cccc") == [UUIDS[2]]
    assert devices.choose("all", None)[1].label() == "GPU 1 Pretend 1"
    assert [d.kind for d in devices.choose("none", 1)] == ["cpu"]


@pytest.mark.usefixtures("three_gpus")
def test_an_unknown_gpu_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError) as caught:
        devices.choose("0,7,GPU-dddd,1,1,,GPU-", None)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[2].partition(".")[0].partition(";")[0] for line in lines] == [
        "there is no GPU 7",
        "there is no GPU GPU-dddd",
        "1 is named twice",
        "a name is empty",
        "there is no GPU GPU-",
    ]
    assert "GPUs: 0 = Pretend 0 GPU-aaaa1111" in lines[-1]


@pytest.mark.usefixtures("three_gpus")
def test_the_beginning_of_a_uuid_must_be_one_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-aaaa{handle}")
    with pytest.raises(ConfigError, match="GPU-aaaa may be GPU-aaaa0 or GPU-aaaa1 or GPU-aaaa2"):
        devices.choose("GPU-aaaa", None)
    assert chosen_uuids("GPU-aaaa1") == ["GPU-aaaa1"]


@pytest.mark.usefixtures("three_gpus")
def test_parts_of_a_gpu_that_is_split_stand_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 1 has two parts of seven that it could have."""

    def part(handle: int, slot: int) -> int:
        if slot not in (0, 3):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 10 * handle + slot

    def mode(handle: int) -> list[int]:
        if handle == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE if handle == 1 else pynvml.NVML_DEVICE_MIG_DISABLE] * 2

    def uuid(handle: int) -> str:
        return UUIDS[handle] if handle < 3 else f"MIG-{handle}-4ae0"

    for name, answer in {
        "nvmlDeviceGetMigMode": mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": part,
        "nvmlDeviceGetUUID": uuid,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    assert chosen_uuids("all") == [UUIDS[0], "MIG-10-4ae0", "MIG-13-4ae0", UUIDS[2]]
    assert chosen_uuids("MIG-13,0") == ["MIG-13-4ae0", UUIDS[0]]
    with pytest.raises(ConfigError, match="1 may be MIG-10-4ae0 or MIG-13-4ae0: say which by its UUID"):
        devices.choose("1", None)
    parts = devices.choose("MIG-10,MIG-13", None)
    # CUDA shows a process one part at most, and NCCL does not talk between parts.
    assert [devices.torch_name(d, parts) for d in parts] == ["cuda:0", "cuda:0"]
    assert [transport.name for transport in transports.candidates(ClusterConfig(), parts)] == [
        "gloo",
        "single",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-13-4ae0")
    assert chosen_uuids("all") == ["MIG-13-4ae0"]


@pytest.mark.usefixtures("three_gpus")
def test_cuda_visible_devices_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert chosen_uuids("all") == [UUIDS[2], UUIDS[1]]
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=2,1 hides all others"):
        devices.choose("0", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7,2")  # CUDA stops at what it does not know
    assert chosen_uuids("all") == [UUIDS[1]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.inventory() == ()


@pytest.mark.usefixtures("three_gpus")
def test_the_gpus_of_other_jobs_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a site lets a job see all GPUs of its node, and CUDA's own variable was lost on the way."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_GPUS": "0,2"}.items():
        monkeypatch.setenv(name, value)
    assert chosen_uuids("all") == [UUIDS[0], UUIDS[2]]
    with pytest.raises(ConfigError, match="SLURM_JOB_GPUS=0,2 hides all others"):
        devices.choose("1", None)


@pytest.mark.usefixtures("three_gpus")
def test_torchs_names_count_the_chosen_gpus_and_ranks_may_share_one() -> None:
    chosen = devices.choose("2,0", 3)
    assert [devices.torch_name(d, chosen) for d in chosen] == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices.torch_name(devices.cpu(0), chosen) == "cpu"


@pytest.mark.usefixtures("three_gpus")
def test_nccl_only_where_each_rank_has_a_gpu_of_its_own() -> None:
    assert ladder() == ["nccl", "nccl in safe mode", "gloo", "single"]
    assert ladder(nccl_safe=True) == ["nccl in safe mode", "gloo", "single"]
    assert ladder(devices.choose("0", 2)) == ["gloo", "single"]
    assert ladder(devices.choose("none", 2), nccl_safe=True) == ["gloo", "single"]


@pytest.mark.usefixtures("three_gpus")
def test_a_backend_that_is_named_is_the_only_one() -> None:
    assert ladder(backend="nccl") == ["nccl"]
    assert ladder(backend="nccl", nccl_safe=True) == ["nccl in safe mode"]
    assert ladder(backend="gloo") == ["gloo"]
    assert ladder(backend="hierarchical_copy") == ["gloo"]
    with pytest.raises(ConfigError, match=r"2 rank\(s\) have 1 GPU\(s\).*backend='gloo'"):
        ladder(devices.choose("0", 2), backend="nccl")
    with pytest.raises(ConfigError, match=r"2 rank\(s\) have 0 GPU\(s\)"):
        ladder(devices.choose("none", 2), backend="nccl")


@pytest.mark.usefixtures("three_gpus")
def test_nccl_on_a_shared_gpu_is_a_question_to_its_version_and_to_the_person(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = devices.choose("0", 2)
    parts = [replace(shared[0], uuid="MIG-1"), replace(shared[0], uuid="MIG-2")]
    alone, nccl_too = ["gloo", "single"], ["nccl", "nccl in safe mode", "gloo", "single"]
    expected = {
        (2, 28, 9): (alone, alone, "NCCL 2.28.9 is installed here, and 2.30 is the first to take a GPU"),
        (2, 30, 4): (nccl_too, alone, "only as an experiment, with NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (2, 31, 2): (nccl_too, nccl_too, "only as an experiment, with NCCL_MULTI_RANK_GPU_ENABLE=1"),
        None: (nccl_too, nccl_too, "only as an experiment, with NCCL_MULTI_RANK_GPU_ENABLE=1"),
    }
    for version, (on_one_gpu, on_parts, refusal) in expected.items():
        monkeypatch.setattr(transports, "installed_nccl", lambda version=version: version)
        monkeypatch.delenv(transports.MULTI_RANK, raising=False)
        assert ladder(shared) == ladder(parts) == alone
        with pytest.raises(ConfigError, match=refusal):
            ladder(shared, backend="nccl")
        monkeypatch.setenv(transports.MULTI_RANK, "1")
        assert (ladder(shared), ladder(parts)) == (on_one_gpu, on_parts)
    # The variable makes no GPUs.
    assert ladder(devices.choose("none", 2)) == alone


def ladder(chosen: Sequence[Device] | None = None, **settings: Any) -> list[str]:
    return [
        transport.name
        for transport in transports.candidates(
            ClusterConfig(**settings), chosen or devices.choose("all", None)
        )
    ]


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("limit", "gpus", "ranks", "expected"),
    [
        ("", "all", None, None),
        ("4GiB", "all", None, 4 * 2**30),
        ("4096 MiB", "0", 2, 4 * 2**30),
        (4294967296, "none", 2, 4 * 2**30),
        (0.5, "all", None, 40 * 2**30),
        ("0.5", "0", 2, 20 * 2**30),
    ],
)
def test_a_memory_limit_in_bytes_of_each_rank(
    limit: object, gpus: str, ranks: int | None, expected: int | None
) -> None:
    chosen = devices.choose(gpus, ranks)
    config = ClusterConfig.checked(memory_limit=limit)
    assert [devices.memory_limit_bytes(config, d, chosen) for d in chosen] == [expected] * len(chosen)


@pytest.mark.usefixtures("three_gpus")
def test_a_memory_limit_that_cannot_be() -> None:
    for text in ("lots", "-1", "0", "4 GB", "1.5", "GiB"):
        with pytest.raises(ConfigError, match="is not an amount of memory"):
            ClusterConfig.checked(memory_limit=text)
    for forgotten in ("4096", 4096):
        with pytest.raises(ConfigError, match=r"'4096' is 4\.0 KiB.*Did you mean 4096MiB\?"):
            ClusterConfig.checked(memory_limit=forgotten)
    with pytest.raises(ConfigError, match=r"'12MiB' is 12\.0 MiB, and a rank needs 64\.0 MiB at least"):
        ClusterConfig.checked(memory_limit="12MiB")
    with pytest.raises(ConfigError, match=r"is more than GPU 0 Pretend 0 has, 80\.0 GiB"):
        nbgpu.Cluster(gpus="0", memory_limit="81GiB")


def test_gpus_and_allocator_settings_as_people_write_them() -> None:
    assert ClusterConfig.checked(gpus=[2, "GPU-aaaa"]).gpus == "2,GPU-aaaa"
    assert ClusterConfig.checked(allocator="expandable_segments:True").allocator == "expandable_segments:True"
    with pytest.raises(ConfigError, match="allocator = 'expandable_segments' is not valid"):
        ClusterConfig.checked(allocator="expandable_segments")
