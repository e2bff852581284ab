"""Read the memory, load, temperature and power of every device of the host, and which processes are on it.

GPUs are read with NVML, which takes no memory on them. What a GPU or a driver does not report is None and
never an error, because cards of some years, parts of a GPU (MIG) and virtual GPUs each leave out something
else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import psutil
import pynvml

from nbgpu.machine.devices import DriversGpu, cpu, is_part, visible_to_driver
from nbgpu.machine.gpu_links import neighbours
from nbgpu.protocol.records import Device

Number = TypeVar("Number", int, float, list[Any])

_NOT_REPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
"""The errors by which NVML says that there is no such number, and not that the GPU is in trouble."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The state of one device at one moment. None stands for what is not reported."""

    device: Device
    whole_name: str = ""
    """The name of the GPU that this device is a part of (MIG); empty for a whole device."""
    used_bytes: int | None = None
    utilization_percent: float | None = None
    """For a GPU the share of time in which a kernel ran; for the CPU the busy share of all its cores."""
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    neighbours: str = ""
    """The nearest other GPUs in words; see `gpu_links.neighbours`."""
    problem: str = ""
    """Why the GPU could not be read, in NVML's words; empty where it could."""


class DeviceMonitor:
    """Reads the devices repeatedly. NVML stays initialized until `close`, because on a machine without
    persistence mode its start takes a second."""

    def __init__(self) -> None:
        self._neighbours: dict[int, str] = {}
        self._cpu_times: tuple[float, float] | None = None
        try:
            pynvml.nvmlInit()
            self._has_driver = True
        except pynvml.NVMLError:
            self._has_driver = False
            return
        wholes = {gpu.device.index: gpu.whole for gpu in visible_to_driver()}
        self._neighbours = neighbours(wholes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the use of NVML. Harmless when repeated."""
        if self._has_driver:
            self._has_driver = False
            pynvml.nvmlShutdown()

    def read(self) -> tuple[DeviceReading, ...]:
        """The state of every GPU that `inventory` lists, and last that of the host's processor."""
        # The GPUs are listed anew each time, because an administrator may split one while the monitor runs.
        gpus = visible_to_driver() if self._has_driver else []
        return (*(self._gpu(gpu) for gpu in gpus), self._cpu())

    def _gpu(self, gpu: DriversGpu) -> DeviceReading:
        device = gpu.device
        part = is_part(device)
        whole_name = gpu.whole_name if part else ""
        near = self._neighbours.get(device.index, "")
        try:
            return DeviceReading(
                device=device,
                whole_name=whole_name,
                used_bytes=_used_bytes(gpu.handle),
                # NVML does not report the load of a part of a GPU, and that of the whole is not its own.
                utilization_percent=None
                if part
                else _reported(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu)),
                temperature_c=_reported(
                    lambda: float(pynvml.nvmlDeviceGetTemperature(gpu.whole, pynvml.NVML_TEMPERATURE_GPU))
                ),
                power_w=_reported(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu.whole) / 1000),
                power_limit_w=_reported(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu.whole) / 1000),
                processes=_processes(gpu.handle),
                neighbours=near,
            )
        except pynvml.NVMLError as error:
            return DeviceReading(device, whole_name=whole_name, neighbours=near, problem=str(error))

    def _cpu(self) -> DeviceReading:
        memory = psutil.virtual_memory()
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        before, self._cpu_times = self._cpu_times, (idle_s, total_s)
        busy_percent = None
        if before is not None and total_s > before[1]:
            busy_percent = 100 * (1 - (idle_s - before[0]) / (total_s - before[1]))
        return DeviceReading(
            device=cpu(0),
            used_bytes=memory.total - memory.available,
            utilization_percent=None if busy_percent is None else min(100.0, max(0.0, busy_percent)),
        )


def _used_bytes(handle: Any) -> int | None:
    """The memory in use, without what the driver keeps for itself where NVML tells the two apart."""
    detailed = _reported(
        lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    )
    return (
        detailed
        if detailed is not None
        else _reported(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
    )


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    found = _reported(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return tuple(
        GpuProcess(int(each.pid), None if each.usedGpuMemory is None else int(each.usedGpuMemory))
        for each in found
    )


def _reported(read: Callable[[], Number]) -> Number | None:
    """The number, or None where the GPU or its driver has no such number."""
    try:
        return read()
    except pynvml.NVMLError as error:
        if error.value not in _NOT_REPORTED:
            raise
        return None
