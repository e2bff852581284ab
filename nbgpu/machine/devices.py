"""The host's GPUs by UUID and how busy they are, or the CPU on a host without a GPU.

The information comes from NVML and not from torch, because the notebook's kernel never imports torch, and a
call to CUDA would take memory on every GPU. A host without a driver counts as a host without GPUs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pynvml

from nbgpu.errors import ConfigError
from nbgpu.machine import numa, processes, slurm_job
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.protocol.records import Device
from nbgpu.text.ranks import named_ranks
from nbgpu.text.sizes import in_words, parse_size

# Engines start without the settings of training, which take a tenth of a second to import.
if TYPE_CHECKING:
    from nbgpu.config import ClusterConfig

DEFAULT_CPU_RANKS = 2
"""The default number of ranks on a host without a GPU."""


@dataclass(frozen=True, slots=True)
class DriversGpu:
    """A GPU, or a part of one, with the driver's handles; valid until `nvmlShutdown`."""

    device: Device
    handle: Any
    whole: Any
    """The handle of the whole GPU, which is `handle` itself unless the device is a part (MIG)."""
    whole_name: str
    """The name of the whole GPU."""
    part: int | None = None
    """The number of a part (MIG) on its GPU, as `nvidia-smi -L` shows it; None for a whole device."""


@dataclass(frozen=True, slots=True)
class UnreadableGpu:
    """A GPU that the driver counts but cannot describe, such as one that has fallen off the bus."""

    index: int
    problem: str
    """The driver's reason."""


@dataclass(frozen=True, slots=True)
class GpusOfDriver:
    """The devices that the driver lists, without those that `CUDA_VISIBLE_DEVICES` or Slurm hides."""

    gpus: tuple[DriversGpu, ...]
    unreadable: tuple[UnreadableGpu, ...]
    num_hidden: int
    """The number of GPUs, or parts of them, that are hidden."""
    hidden_by: str = ""
    """The variable or job that hides them, for messages."""


def inventory() -> tuple[Device, ...]:
    """Return every NVIDIA GPU of the host, or part of one (MIG), that can be read and that neither
    `CUDA_VISIBLE_DEVICES` nor the Slurm job of this process hides, in the driver's order."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(gpu.device for gpu in listed_by_driver().gpus)
    finally:
        pynvml.nvmlShutdown()


def listed_by_driver() -> GpusOfDriver:
    """Return the devices of `inventory` with their handles, and those that cannot be read. The caller has
    called `nvmlInit`."""
    gpus: list[DriversGpu] = []
    unreadable: list[UnreadableGpu] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        # A GPU that is lost must not hide the others.
        try:
            gpus += _parts(pynvml.nvmlDeviceGetHandleByIndex(index), index)
        except pynvml.NVMLError as error:
            unreadable.append(UnreadableGpu(index, str(error)))
    restriction = slurm_job.restriction(len(gpus) + len(unreadable))
    if restriction is None:
        return GpusOfDriver(tuple(gpus), tuple(unreadable), 0)
    by_device = {gpu.device: gpu for gpu in gpus}
    visible = tuple(by_device[device] for device in _visible(tuple(by_device), restriction.names))
    # Of an unreadable GPU only the number is known, so each UUID that was not found may be its UUID.
    names = [name.strip() for name in restriction.names.split(",")]
    missing = [name for name in names if name and not _matching(tuple(by_device), name)]
    shown = [gpu for gpu in unreadable if any(not n.isdigit() or int(n) == gpu.index for n in missing)]
    num_hidden = len(gpus) - len(visible) + len(unreadable) - len(shown)
    return GpusOfDriver(visible, tuple(shown), num_hidden, restriction.by)


def _parts(handle: Any, index: int) -> list[DriversGpu]:
    """Return a GPU, or its parts if it is split (MIG), because CUDA cannot use a split GPU as a whole."""
    if not _is_split(handle):
        return [_drivers_gpu(handle, handle, index, None)]
    parts = []
    for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):  # the GPU has fewer parts than it could have
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            parts.append(_drivers_gpu(part, handle, index, slot))
    return parts


def _drivers_gpu(handle: Any, whole: Any, index: int, part: int | None) -> DriversGpu:
    """Describe a GPU, or a part of a split one (MIG). Its compute capability and its NUMA node are those of
    the whole GPU."""
    device = Device(
        kind="cuda",
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        memory_bytes=_memory_bytes(handle),
        compute_capability=_compute_capability(whole),
        numa_node=numa.node_of_gpu(whole),
    )
    return DriversGpu(device, handle, whole, _text(pynvml.nvmlDeviceGetName(whole)), part)


def _memory_bytes(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        # The driver reports no memory for a GPU that has none of its own and shares the host's.
        return int(psutil.virtual_memory().total)


def _is_split(handle: Any) -> bool:
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(mode == pynvml.NVML_DEVICE_MIG_ENABLE)


def choose(gpus: str, ranks: int | None) -> tuple[Device, ...]:
    """Return the device of every rank, in order of rank, for values of `gpus` other than 'auto' and 'free:N',
    for which `nbgpu.host.free_gpus` chooses.

    Args:
        gpus: 'all', 'none', or GPUs by index or by the beginning of their UUID, separated by commas.
        ranks: the number of ranks; None for one on each GPU, or 2 on the CPU.

    Raises:
        ConfigError: a GPU does not exist, is named twice, or is ambiguous; the message lists the GPUs of the
            host.
    """
    assert not gpus_setting.takes_free(gpus), f"{gpus} depends on which GPUs are free"
    if gpus == gpus_setting.NONE:
        return one_for_each_rank((), ranks)
    present = inventory()
    return one_for_each_rank(present if gpus == gpus_setting.ALL else _named(present, gpus), ranks)


def one_for_each_rank(chosen: Sequence[Device], ranks: int | None) -> tuple[Device, ...]:
    """Return the device of every rank, in order of rank: one of the chosen GPUs, or the CPU if none is
    chosen.

    Args:
        chosen: the GPUs.
        ranks: the number of ranks; None for one on each GPU, or 2 on the CPU.
    """
    if not chosen:
        return tuple(cpu(rank) for rank in range(ranks or DEFAULT_CPU_RANKS))
    # If there are more ranks than GPUs, ranks share them. That is slow, but allows to learn with one GPU what
    # several ranks do.
    return tuple(chosen[rank % len(chosen)] for rank in range(ranks or len(chosen)))


def is_part(device: Device) -> bool:
    """Return whether a device is a part of a GPU that is split (MIG)."""
    return device.uuid.startswith("MIG-")


def torch_name(device: Device, chosen: Sequence[Device]) -> str:
    """Return torch's name of a device, 'cuda:1' or 'cpu', in a process that sees only the chosen GPUs, in
    their order.

    A process with a part of a GPU (MIG) sees no other device, because CUDA shows a process at most one part.
    """
    if device.kind == "cpu":
        return "cpu"
    if is_part(device):
        return "cuda:0"
    return f"cuda:{list(dict.fromkeys(d.uuid for d in chosen)).index(device.uuid)}"


def visible_gpus(chosen: Sequence[Device]) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` for ranks on these devices: each GPU once, in order."""
    return ",".join(dict.fromkeys(device.uuid for device in chosen if device.kind == "cuda"))


def memory_limit_bytes(config: ClusterConfig, device: Device, chosen: Sequence[Device]) -> int | None:
    """Return the memory limit of each rank on a device, in bytes; None if `memory_limit` is empty.

    A share of a device is divided among the ranks on it, while a number of bytes applies to each of them.

    Raises:
        ConfigError: the limit is more than the device has.
    """
    if not config.memory_limit:
        return None
    limit = parse_size(config.memory_limit)
    if isinstance(limit, float):
        num_sharing = sum(d.kind == device.kind and d.uuid == device.uuid for d in chosen)
        return int(limit * device.memory_bytes / num_sharing)
    if limit > device.memory_bytes:
        raise ConfigError(
            f"memory_limit = {config.memory_limit!r} is more than {device.label()} has, "
            f"{in_words(device.memory_bytes)}. Give less, or leave it out"
        )
    return limit


def rank_memory_bytes(config: ClusterConfig, device: Device, chosen: Sequence[Device]) -> int:
    """Return the memory that a rank on this device may take, in bytes: the limit, or its share of the device.

    Raises:
        ConfigError: the limit is more than the device has.
    """
    num_sharing = sum(d.kind == device.kind and d.uuid == device.uuid for d in chosen)
    return memory_limit_bytes(config, device, chosen) or device.memory_bytes // num_sharing


def least_rank_memory_bytes(config: ClusterConfig, chosen: Sequence[Device]) -> int:
    """Return the smallest memory that any rank on these devices may take, in bytes.

    Raises:
        ConfigError: the limit is more than a device has.
    """
    return min(rank_memory_bytes(config, device, chosen) for device in chosen)


def require_simulable(config: ClusterConfig, chosen: Sequence[Device]) -> None:
    """Refuse settings of a simulated link or of slow ranks that cannot be simulated on these devices.

    Raises:
        ConfigError: a rank has a GPU, which cannot be slowed down from outside, or a slow rank does not
            exist; with a line for each.
    """
    problems = []
    names = [name for name in ("link", "slow_rank") if getattr(config, name)]
    if names and any(device.kind == "cuda" for device in chosen):
        settings = " and ".join(f"{name}={getattr(config, name)!r}" for name in names)
        problems.append(
            f"{settings} cannot be simulated on GPUs, which work at their own pace. Add gpus='none' for CPU ranks"
        )
    absent = [rank for rank in config.slow_factors if rank >= len(chosen)]
    if absent:
        problems.append(
            f"slow_rank={config.slow_rank!r} names {named_ranks(absent)}, and there are {len(chosen)} rank(s), counted "
            "from 0. Name one of them, or start more ranks"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def cpu(rank: int) -> Device:
    """Return the host's processor as the device of a CPU rank."""
    return Device("cpu", _cpu_name(), "", rank, psutil.virtual_memory().total)


def utilization_probe(device: Device) -> Callable[[], Mapping[str, float]]:
    """Return a function that returns the `utilization_percent` of a device since the function's last call.

    For a GPU this is the share of time in which a kernel ran, according to NVML. For a CPU it is this
    process's CPU time divided by the elapsed time: 100 is one whole core, so two busy threads show as 200. A
    CPU rank's values also have its memory, `memory_rss_bytes`, and, if the kernel counts it,
    `utilization_lost_percent`: the share of the time for which the main thread was ready to run but had no
    core.
    """
    if device.kind == "cpu":
        process = psutil.Process()
        # The first call begins the interval that the next one measures.
        process.cpu_percent()
        lost_percent = _lost_core_time()
        return lambda: {
            "utilization_percent": process.cpu_percent(),
            **lost_percent(),
            "memory_rss_bytes": float(process.memory_info().rss),
        }
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
    if is_part(device):
        return lambda: {}  # NVML does not report the utilization of a part of a GPU
    return lambda: {"utilization_percent": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _lost_core_time() -> Callable[[], Mapping[str, float]]:
    """Return a function that returns `utilization_lost_percent` since its last call, or an empty mapping if
    the kernel was built without scheduler statistics."""
    if (before := processes.main_thread_core_use()) is None:
        return lambda: {}
    before_s = time.monotonic()

    def lost() -> Mapping[str, float]:
        nonlocal before, before_s
        now, now_s = processes.main_thread_core_use(), time.monotonic()
        if now is None or before is None or now_s <= before_s:
            return {}
        share = (now.waited_s - before.waited_s) / (now_s - before_s)
        before, before_s = now, now_s
        return {"utilization_lost_percent": 100 * min(1.0, share)}

    return lost


def _visible(gpus: Sequence[Device], names: str) -> tuple[Device, ...]:
    """Return the GPUs that CUDA shows for these names. It ignores the first unknown name and all after it."""
    chosen: list[Device] = []
    for name in names.split(","):
        found = _matching(gpus, name.strip())
        if len(found) != 1:
            break
        chosen += found
    return tuple(chosen)


def _compute_capability(handle: Any) -> float:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return float(f"{major}.{minor}")


def _named(gpus: Sequence[Device], names: str) -> tuple[Device, ...]:
    """Return the GPUs that the user has named; ConfigError with a line for each wrong name."""
    chosen: list[Device] = []
    wrong = []
    for name in (part.strip() for part in names.split(",")):
        found = _matching(gpus, name)
        if not name:
            wrong.append("a name is empty; 'none' takes CPU ranks")
        elif not found:
            wrong.append(f"there is no GPU {name}")
        elif len(found) > 1:
            wrong.append(f"{name} may be {' or '.join(d.uuid for d in found)}: say which by its UUID")
        elif found[0] in chosen:
            wrong.append(f"{name} is named twice; for two ranks on one GPU name it once and give ranks=2")
        else:
            chosen += found
    if not wrong:
        return tuple(chosen)
    present = "; ".join(f"{g.index} = {g.name} {g.uuid}" for g in gpus) or "none on this machine"
    # `gpus` are the GPUs that a restriction has left. Slurm's names count as a restriction only if there are
    # more GPUs than names, which one more stands for.
    restriction = slurm_job.restriction(len(gpus) + 1)
    hidden = ""
    if restriction is not None and restriction.names:
        hidden = f". {restriction.by} hides all others; the numbers are nvidia-smi's"
    raise ConfigError(
        "\n".join(f"gpus = {names!r}: {problem}" for problem in wrong) + f". GPUs: {present}{hidden}"
    )


def _matching(gpus: Sequence[Device], name: str) -> list[Device]:
    """Return the GPUs with this number, or whose UUID begins with this text, which has 5 characters or
    more."""
    if name.isdigit():
        return [gpu for gpu in gpus if gpu.index == int(name)]
    return [gpu for gpu in gpus if len(name) > 4 and gpu.uuid.startswith(name)]


def _text(value: str | bytes) -> str:
    # Older bindings of NVML return bytes.
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
