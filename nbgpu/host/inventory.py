"""What this host has for ranks to use."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from nbgpu.machine import devices
from nbgpu.protocol.records import Device


@dataclass(frozen=True)
class Inventory:
    """A host's GPUs, cores and memory."""

    gpus: tuple[Device, ...]
    num_cores: int
    """The cores that this process may use."""
    memory_bytes: int


def take() -> Inventory:
    """What this host has for ranks to use now."""
    return Inventory(devices.inventory(), len(os.sched_getaffinity(0)), int(psutil.virtual_memory().total))
