"""The environment variables that the engines of a cluster are started with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib import metadata

from nbgpu.config import ClusterConfig
from nbgpu.machine import devices
from nbgpu.protocol.records import Device

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that torch's allocator reads; newer versions of torch read both, and the second wins."""
_TORCH_WITH_ALLOC_CONF = (2, 10)


def of_engines(config: ClusterConfig, ranks_devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that are set for every engine of a cluster whose ranks have these devices.

    Warn if a setting is left out.
    """
    return {
        # Every rank sees the cluster's GPUs, in order, as under torchrun: `cuda:local_rank` is the rank's
        # own.
        "CUDA_VISIBLE_DEVICES": devices.visible_gpus(ranks_devices),
        "OMP_NUM_THREADS": str(config.threads_for(len(ranks_devices))),
        **({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if config.debug else {}),
        **_allocator_settings(config.allocator),
    }


def _allocator_settings(wanted: str) -> dict[str, str]:
    """Return the variables with the allocator's settings; torch reads them once, when it is loaded."""
    theirs = [f"{name}={os.environ[name]}" for name in _ALLOCATOR_VARIABLES if os.environ.get(name)]
    if wanted and theirs:
        warnings.warn(
            f"allocator={wanted!r} is left out, because you have set {' and '.join(theirs)}", stacklevel=5
        )
    if not wanted or theirs:
        return {}
    newer = tuple(int(part) for part in metadata.version("torch").split(".")[:2]) >= _TORCH_WITH_ALLOC_CONF
    return {_ALLOCATOR_VARIABLES[0 if newer else 1]: wanted}
