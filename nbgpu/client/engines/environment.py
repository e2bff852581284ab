"""The environment variables that the engines of a cluster are started with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from nbgpu.config import ClusterConfig
from nbgpu.machine import allocator, devices
from nbgpu.protocol.records import Device

_USE_NCCL2 = "TORCH_DIST_USE_NCCL2"
"""torch's own variable, read when it is loaded, that chooses between its two backends for NCCL."""


def engine_variables(config: ClusterConfig, ranks_devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that are set for every engine of a cluster whose ranks have these devices.

    Warn if a setting is left out.
    """
    return {
        # Every rank sees the cluster's GPUs, in order, as under torchrun: `cuda:local_rank` is the rank's
        # own.
        "CUDA_VISIBLE_DEVICES": devices.visible_gpus(ranks_devices),
        "OMP_NUM_THREADS": str(config.threads_for(len(ranks_devices))),
        **({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if config.debug else {}),
        # nccl2, the default since torch 2.15, ends the process after an abort or a timeout
        # (https://github.com/pytorch/pytorch/pull/192105), unless its groups are formed again in place. No
        # GPU has run either.
        _USE_NCCL2: os.environ.get(_USE_NCCL2, "0"),
        **_allocator_settings(config.allocator),
    }


def _allocator_settings(wanted: str) -> dict[str, str]:
    """Return the variables with the allocator's settings; torch reads them once, when it is loaded."""
    theirs = allocator.set_variables()
    if wanted and theirs:
        warnings.warn(
            f"allocator={wanted!r} is left out, because you have set {' and '.join(theirs)}", stacklevel=5
        )
    return {allocator.variable(): wanted} if wanted and not theirs else {}
