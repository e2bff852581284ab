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

    Warn if the setting `allocator` cannot be honoured.
    """
    return {
        # As under torchrun, every rank sees the cluster's GPUs, in order, and its own is `cuda:local_rank`.
        "CUDA_VISIBLE_DEVICES": devices.visible_gpus(ranks_devices),
        "OMP_NUM_THREADS": str(config.threads_for(len(ranks_devices))),
        **({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if config.debug else {}),
        # The backend nccl2, torch's default since 2.15, ends the process after an abort or a timeout
        # (https://github.com/pytorch/pytorch/pull/192105), unless its groups are formed again in place.
        # Neither has been tried on a GPU.
        _USE_NCCL2: os.environ.get(_USE_NCCL2, "0"),
        **_allocator_settings(config.allocator),
    }


def _allocator_settings(setting: str) -> dict[str, str]:
    """Return the variable with the settings of CUDA's memory allocator, which torch reads once, when it is
    loaded. Variables that the user has set take precedence."""
    set_by_user = allocator.set_variables()
    if setting and set_by_user:
        warnings.warn(
            f"allocator={setting!r} is left out, because you have set {' and '.join(set_by_user)}",
            stacklevel=5,
        )
    return {allocator.variable(): setting} if setting and not set_by_user else {}
