"""Which GPUs there are, by UUID, and how busy they are; the CPU where there is none.

NVML is asked and not torch: the notebook's kernel never imports torch, and a question to CUDA would take
memory on every GPU. A machine with no driver is not an error, it is a machine with no GPU.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError
from nbgpu.records import Device

DEFAULT_CPU_RANKS = 2


def inventory() -> tuple[Device, ...]:
    """Every NVIDIA GPU of the host that `CUDA_VISIBLE_DEVICES` leaves visible, in the driver's order."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                Device(
                    kind="cuda",
                    name=_text(pynvml.nvmlDeviceGetName(handle)),
                    uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                    index=index,
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    compute_capability=_compute_capability(handle),
                )
            )
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(gpus) if visible is None else _named(tuple(gpus), visible, skip_unknown=True)


def choose(gpus: str, ranks: int | None) -> tuple[Device, ...]:
    """The device of every rank, in order of rank.

    Args:
        gpus: 'auto', 'none', or GPUs by index or UUID (its beginning is enough), separated by commas.
        ranks: how many; None is one for each GPU, or 2 on the CPU.

    Raises:
        ConfigError: a GPU is named that is not there; the message lists those that are.
    """
    if gpus == "none":
        chosen: tuple[Device, ...] = ()
    elif gpus == "auto":
        chosen = inventory()
    else:
        chosen = _named(inventory(), gpus, skip_unknown=False)
    if not chosen:
        return tuple(cpu(rank) for rank in range(ranks or DEFAULT_CPU_RANKS))
    # More ranks than GPUs share them in turn: slow, but it lets one GPU show what two ranks do.
    return tuple(chosen[rank % len(chosen)] for rank in range(ranks or len(chosen)))


def torch_name(device: Device, chosen: Sequence[Device]) -> str:
    """torch's name of a device in a process that sees the chosen GPUs only, in their order: 'cuda:1' or 'cpu'."""
    if device.kind == "cpu":
        return "cpu"
    return f"cuda:{list(dict.fromkeys(d.uuid for d in chosen)).index(device.uuid)}"


def backend(config: ClusterConfig, chosen: Sequence[Device]) -> str:
    """The backend in force: NCCL wants a GPU for each rank, everything else goes over gloo."""
    gpus = [d.uuid for d in chosen if d.kind == "cuda"]
    own_gpu_each = bool(gpus) and len(set(gpus)) == len(gpus)
    if config.backend == "nccl" and not own_gpu_each:
        raise ConfigError(
            f"backend = 'nccl' needs a GPU for each rank, and {len(chosen)} rank(s) have {len(set(gpus))} GPU(s). "
            "Give backend='gloo', or fewer ranks"
        )
    if config.backend != "auto":
        return config.backend
    return "nccl" if own_gpu_each else "gloo"


def cpu(rank: int) -> Device:
    """The host's processor, as the device of one CPU rank."""
    return Device("cpu", _cpu_name(), "", rank, psutil.virtual_memory().total)


def utilization_probe(device: Device) -> Callable[[], Mapping[str, float]]:
    """A function that returns `utilization_percent` of the device since it was last called.

    For a GPU it is NVML's share of time in which a kernel ran. For a CPU it is this process's CPU time over
    the time that passed, 100 for one whole core, so that two busy threads show as 200.
    """
    if device.kind == "cpu":
        process = psutil.Process()
        process.cpu_percent()
        return lambda: {
            "utilization_percent": process.cpu_percent(),
            "memory_rss_bytes": float(process.memory_info().rss),
        }
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
    return lambda: {"utilization_percent": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _named(gpus: tuple[Device, ...], names: str, *, skip_unknown: bool) -> tuple[Device, ...]:
    chosen, unknown = [], []
    for name in filter(None, (part.strip() for part in names.split(","))):
        found = next(
            (g for g in gpus if name == str(g.index) or (len(name) > 4 and g.uuid.startswith(name))), None
        )
        if found is not None:
            chosen.append(found)
        elif skip_unknown:
            # CUDA itself ignores the list from the first name on that it does not know.
            break
        else:
            unknown.append(name)
    if unknown:
        there = "; ".join(f"{g.index} = {g.name} {g.uuid}" for g in gpus) or "none on this machine"
        raise ConfigError(f"gpus = {names!r}: there is no GPU {', '.join(unknown)}. GPUs: {there}")
    return tuple(chosen)


def _compute_capability(handle: Any) -> float:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return float(f"{major}.{minor}")


def _text(value: str | bytes) -> str:
    # Older bindings of NVML answer in bytes.
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
