"""GPUs on which a kernel still runs although the processes that began it have ended.

A kernel of NCCL whose process was killed may stay on its GPU until the GPU is reset. No process can use the
GPU meanwhile, and NVML is the only one that knows of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from nbgpu.machine.gpus.readings import DeviceMonitor
from nbgpu.protocol.records import Device

_PATIENCE_S = 3.0
"""NVML reports the load of the last second."""
_LOOK_PERIOD_S = 0.25


def with_processes(monitor: DeviceMonitor) -> set[str]:
    """The UUIDs of the GPUs for which NVML names a process. In a container it may name none, so that nothing
    can be said of a GPU without one."""
    return {reading.device.uuid for reading in monitor.read().devices if reading.processes}


def still_busy(monitor: DeviceMonitor, uuids: Collection[str]) -> list[Device]:
    """The GPUs among these that compute all the time that one looks, and have no process."""
    give_up_s = time.monotonic() + _PATIENCE_S
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
        time.sleep(_LOOK_PERIOD_S)
