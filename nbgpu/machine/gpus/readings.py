"""Read the memory, load, temperature, power and processes of every device of the host.

GPUs are read with NVML, which takes no memory on them. A value that a GPU or its driver does not report is
None and not an error, because older cards, parts of a GPU (MIG) and virtual GPUs each lack other values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import psutil
import pynvml

from nbgpu.machine.devices import DriversGpu, cpu, is_part, listed_by_driver
from nbgpu.machine.gpus.links import costs, neighbours
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
"""NVML's errors for a value that the GPU or the driver does not report. Other errors mean that the GPU is
faulty."""
_RESTART_PERIOD_S = 10.0
"""The minimum time between two initializations of NVML while a GPU cannot be read. NVML sees that a GPU was
reset only after a new initialization."""

_LOAD_PATIENCE_S = 3.0
"""A GPU must show load for this time to count as busy, because NVML reports the load of the last second."""
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The state of one device at one moment. None stands for values that are not reported."""

    device: Device
    whole_name: str = ""
    """The name of the GPU that this device is a part of (MIG); empty for a whole device."""
    part: int | None = None
    """The number of this part on its GPU, as `nvidia-smi -L` shows it; None for a whole device."""
    used_bytes: int | None = None
    graphics_bytes: int = 0
    """The part of `used_bytes` of processes that only draw on a screen, such as a desktop's."""
    utilization_percent: float | None = None
    """For a GPU the share of time in which a kernel ran; for the CPU the busy share of all its cores since
    the previous reading, so that the first reading has None."""
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    neighbours: str = ""
    """The nearest other GPUs, such as 'NVLink to GPUs 1 and 2'; empty if none is near."""
    problem: str = ""
    """NVML's reason why the GPU could not be read; empty if it could."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """The state of all devices of the host at one moment."""

    devices: tuple[DeviceReading, ...]
    """The GPUs in the driver's order, and last the host's processor."""
    num_hidden: int = 0
    """The number of GPUs that `CUDA_VISIBLE_DEVICES` or Slurm hides."""
    hidden_by: str = ""
    """The variable or job that hides them, for messages."""
    problem: str = ""
    """NVML's reason why the driver cannot be used; empty if it can, and on a host without a driver."""


class DeviceMonitor:
    """Reads the devices repeatedly. The first reading initializes NVML. It stays initialized until `close`,
    because without persistence mode the initialization takes a second."""

    def __init__(self) -> None:
        self._has_driver = False
        self._started_s = 0.0
        self._is_in_trouble = False
        self._known: dict[int, Device] = {}
        """The GPUs by number, as they were last read, for GPUs that can no longer be read."""
        self._neighbours: dict[int, str] = {}
        """The description of each whole GPU's nearest other GPUs, by the driver's number."""
        self._neighbours_of: tuple[str, ...] = ()
        """The UUIDs of the devices for which `_neighbours` was made."""
        self._processor = cpu(0)
        self._cpu_times_s: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut NVML down until the next reading. May be called repeatedly."""
        if self._has_driver:
            self._has_driver = False
            pynvml.nvmlShutdown()

    def read(self) -> HostReading:
        """Return the state of every GPU that `inventory` lists, of faulty GPUs, and of the host's
        processor."""
        processor = self._cpu()
        try:
            gpus, num_hidden, hidden_by = self._gpus() if self._start() else ((), 0, "")
        except pynvml.NVMLError as error:
            self._is_in_trouble = True
            return HostReading((processor,), problem=str(error))
        self._is_in_trouble = any(gpu.problem for gpu in gpus)
        return HostReading((*gpus, processor), num_hidden, hidden_by)

    def link_costs(self, gpus: Sequence[Device]) -> dict[frozenset[str], int]:
        """Return the cost of the connection between each two of these GPUs, by their UUIDs; the least cost is
        the fastest connection. Parts of a GPU (MIG) have no connections, and are left out."""
        whole = [gpu.uuid for gpu in gpus if not is_part(gpu)]
        if not self._start():
            return {}
        return costs({uuid: pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in whole})

    def _start(self) -> bool:
        """Initialize NVML if necessary; return whether the host has a driver.

        Raises:
            pynvml.NVMLError: there is a driver that cannot be used.
        """
        if self._is_in_trouble and time.monotonic() - self._started_s > _RESTART_PERIOD_S:
            self.close()
        if not self._has_driver:
            self._started_s = time.monotonic()
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError_LibraryNotFound:
                return False
            self._has_driver = True
        return True

    def _gpus(self) -> tuple[tuple[DeviceReading, ...], int, str]:
        """Return the readings of all GPUs in the driver's order, with faulty GPUs; the number of hidden GPUs;
        and the variable or job that hides them."""
        # The GPUs are listed each time, because an administrator may split one while the monitor runs.
        listed = listed_by_driver()
        uuids = tuple(gpu.device.uuid for gpu in listed.gpus)
        # The driver is asked about every pair of GPUs, so only when the devices have changed.
        if uuids != self._neighbours_of:
            self._neighbours = neighbours(
                {gpu.device.index: gpu.whole for gpu in listed.gpus if gpu.part is None}
            )
            self._neighbours_of = uuids
        self._known |= {gpu.device.index: gpu.device for gpu in listed.gpus if gpu.part is None}
        readings = [self._gpu(gpu) for gpu in listed.gpus]
        for lost in listed.unreadable:
            device = self._known.get(lost.index, Device("cuda", "", "", lost.index, 0))
            following = (i for i, reading in enumerate(readings) if reading.device.index > lost.index)
            readings.insert(next(following, len(readings)), DeviceReading(device, problem=lost.problem))
        return tuple(readings), listed.num_hidden, listed.hidden_by

    def _gpu(self, gpu: DriversGpu) -> DeviceReading:
        """Read one GPU, or one part of a split GPU. Temperature and power are those of the whole GPU; what is
        not reported is None."""
        device, part = gpu.device, gpu.part
        whole_name = "" if part is None else gpu.whole_name
        # From a part of a GPU, a process can reach no other part and no other GPU.
        near = self._neighbours.get(device.index, "") if part is None else ""
        try:
            processes = _processes(gpu.handle, pynvml.nvmlDeviceGetComputeRunningProcesses)
            computing = {process.pid for process in processes}
            drawing = _processes(gpu.handle, pynvml.nvmlDeviceGetGraphicsRunningProcesses)
            return DeviceReading(
                device=device,
                whole_name=whole_name,
                part=part,
                used_bytes=_used_bytes(gpu.handle),
                graphics_bytes=sum(p.used_bytes or 0 for p in drawing if p.pid not in computing),
                # NVML reports only the load of the whole GPU, which is not that of a part.
                utilization_percent=_reported(
                    lambda: float(pynvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu)
                )
                if part is None
                else None,
                temperature_c=_reported(
                    lambda: float(pynvml.nvmlDeviceGetTemperature(gpu.whole, pynvml.NVML_TEMPERATURE_GPU))
                ),
                power_w=_reported(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu.whole) / 1000),
                power_limit_w=_reported(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu.whole) / 1000),
                processes=processes,
                neighbours=near,
            )
        except pynvml.NVMLError as error:
            return DeviceReading(
                device, whole_name=whole_name, part=part, neighbours=near, problem=str(error)
            )

    def _cpu(self) -> DeviceReading:
        """Read the memory and the load of the host's processor. The load is the busy share since the last
        reading."""
        memory = psutil.virtual_memory()
        before, self._cpu_times_s = self._cpu_times_s, _cpu_times_s()
        busy_percent = None
        if before is not None and (total_s := self._cpu_times_s[1] - before[1]) > 0:
            busy_percent = 100 * (1 - (self._cpu_times_s[0] - before[0]) / total_s)
        return DeviceReading(
            device=self._processor,
            used_bytes=memory.total - memory.available,
            utilization_percent=None if busy_percent is None else min(100.0, max(0.0, busy_percent)),
        )


def _cpu_times_s() -> tuple[float, float]:
    """Return the (idle, total) time of all cores since the host started."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # The time of guests is already contained in that of users.
    return idle_s, sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def _used_bytes(handle: Any) -> int | None:
    """Return the memory in use, without the driver's own memory if NVML reports that separately."""
    detailed = _reported(
        lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    )
    if detailed is not None:
        return detailed
    return _reported(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))


def _processes(handle: Any, running: Callable[[Any], Any]) -> tuple[GpuProcess, ...]:
    found = _reported(lambda: running(handle)) or []
    return tuple(
        GpuProcess(int(each.pid), None if each.usedGpuMemory is None else int(each.usedGpuMemory))
        for each in found
    )


def _reported(read: Callable[[], Number]) -> Number | None:
    """Return the result of a call of NVML, or None if the GPU or its driver does not report the value."""
    try:
        return read()
    except pynvml.NVMLError as error:
        if error.value not in _NOT_REPORTED:
            raise
        return None


def gpus_with_processes(monitor: DeviceMonitor) -> set[str]:
    """Return the UUIDs of the GPUs for which NVML lists a process. In a container it may list none, so that a
    GPU without a process may still be used."""
    return {reading.device.uuid for reading in monitor.read().devices if reading.processes}


def still_busy(monitor: DeviceMonitor, uuids: Collection[str]) -> list[Device]:
    """Return the GPUs among these that compute without a process: for three seconds, NVML always reports load
    and lists no process.

    A kernel of NCCL whose process was killed may stay on its GPU until the GPU is reset, and no process can
    use the GPU meanwhile. Only NVML's load shows this.
    """
    give_up_s = time.monotonic() + _LOAD_PATIENCE_S
    busy: dict[str, Device] | None = None
    while True:
        now = {
            reading.device.uuid: reading.device
            for reading in monitor.read().devices
            if reading.device.uuid in uuids and not reading.processes and reading.utilization_percent
        }
        busy = now if busy is None else {uuid: device for uuid, device in busy.items() if uuid in now}
        if not busy or time.monotonic() > give_up_s:
            return list(busy.values())
        time.sleep(_POLL_S)
