"""A stand-in for NVML in the process that calls `install`: GPUs, parts of GPUs (MIG), links and load.

NVML alone needs the hardware. All that is above it is the real thing: cards, panel, terminal, server.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30


@dataclass
class PretendGpu:
    """One GPU, or a part of one, as NVML is to describe it. The fields are in NVML's own units."""

    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    used: int = int(0.4 * GIB)
    reserved: int = int(0.6 * GIB)
    """What the driver keeps for itself, which NVML's older call counts as used."""
    load: int | None = 0
    celsius: int | None = 31
    milliwatts: int | None = 72_000
    processes: list[tuple[int, int]] = field(default_factory=list)
    """(pid, bytes) of each process that computes on it."""
    desktop: list[tuple[int, int]] = field(default_factory=list)
    """(pid, bytes) of each process that draws on a screen."""
    parts: list[PretendGpu] = field(default_factory=list)
    is_lost: bool = False
    uuid: str = ""
    bus_id: str = "00000000:FF:00.0"
    """The PCI address; Linux knows none of this one."""
    whole: PretendGpu | None = None


def several(number: int) -> list[PretendGpu]:
    """That many free GPUs."""
    return [PretendGpu() for _ in range(number)]


def split_in(profiles: list[str], **values: Any) -> PretendGpu:
    """A GPU that is split into parts of these profiles, such as '1g.10gb'."""
    parts = [
        PretendGpu(
            name=f"NVIDIA A100-SXM4-80GB MIG {profile}",
            total=int(profile.partition(".")[2].removesuffix("gb")) * GIB,
            used=12 * 2**20,
            load=None,
        )
        for profile in profiles
    ]
    return PretendGpu(name="NVIDIA A100-SXM4-80GB", load=None, parts=parts, **values)


def install(gpus: list[PretendGpu], *, has_nvlink: bool = True, patch: Any = None) -> list[PretendGpu]:
    """Put the stand-in into `pynvml`. The GPUs may be changed afterwards; the next reading shows it.

    Args:
        gpus: the GPUs in the driver's order.
        has_nvlink: whether each pair has an NVLink; otherwise each two share a PCIe switch.
        patch: pytest's `monkeypatch`, which takes the stand-in out again; None to leave it in.
    """
    for index, gpu in enumerate(gpus):
        gpu.uuid = gpu.uuid or f"GPU-{index:08x}-1111-2222-3333-444455556666"
        for slot, part in enumerate(gpu.parts):
            part.uuid = part.uuid or f"MIG-{index:04x}{slot:04x}-1111-2222-3333-444455556666"
            part.whole = gpu

    def reported(value: Any) -> Any:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def memory(handle: PretendGpu, version: int | None = None) -> Any:
        if (handle.whole or handle).is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        used = handle.used + (0 if version else handle.reserved)
        free = handle.total - handle.used - handle.reserved
        return SimpleNamespace(total=handle.total, used=used, free=free)

    def by_index(index: int) -> PretendGpu:
        if gpus[index].is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpus[index]

    def part(handle: PretendGpu, slot: int) -> PretendGpu:
        if slot >= len(handle.parts):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle.parts[slot]

    def p2p(first: PretendGpu, second: PretendGpu, kind: int) -> int:
        if kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK and not has_nvlink:
            return int(pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORED)
        return int(pynvml.NVML_P2P_STATUS_OK)

    def topology(first: PretendGpu, second: PretendGpu) -> int:
        one_switch = gpus.index(first) // 2 == gpus.index(second) // 2
        return int(pynvml.NVML_TOPOLOGY_SINGLE if one_switch else pynvml.NVML_TOPOLOGY_SYSTEM)

    def no_link(handle: PretendGpu, link: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    by_uuid = {each.uuid: each for gpu in gpus for each in [gpu, *gpu.parts]}
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: by_uuid[uuid],
        "nvmlDeviceGetName": lambda handle: handle.name,
        "nvmlDeviceGetUUID": lambda handle: handle.uuid,
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=handle.bus_id),
        "nvmlDeviceGetComputeMode": lambda handle: pynvml.NVML_COMPUTEMODE_DEFAULT,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMigMode": lambda handle: [int(bool(handle.parts))] * 2,
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": part,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=reported(handle.load)),
        "nvmlDeviceGetTemperature": lambda handle, sensor: reported(handle.celsius),
        "nvmlDeviceGetPowerUsage": lambda handle: reported(handle.milliwatts),
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes
        ],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.desktop
        ],
        "nvmlDeviceGetP2PStatus": p2p,
        "nvmlDeviceGetTopologyCommonAncestor": topology,
        "nvmlDeviceGetNvLinkState": no_link,
    }
    assert all(hasattr(pynvml, name) for name in answers)
    for name, answer in answers.items():
        if patch is not None:
            patch.setattr(pynvml, name, answer)
        else:
            setattr(pynvml, name, answer)
    return gpus


def varied(number: int) -> list[PretendGpu]:
    """GPUs of which some are busy, for looking at."""
    made = several(number)
    loads = itertools.cycle([0, 97, 42, 0, 100, 7, 0, 63])
    for gpu, load in zip(made, loads, strict=False):
        gpu.load = load
        if load:
            gpu.used, gpu.celsius, gpu.milliwatts = (
                int(load * 0.7 * GIB),
                40 + load // 3,
                100_000 + 5000 * load,
            )
    return made
