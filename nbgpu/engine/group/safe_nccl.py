"""NCCL without the features that fail in containers and on unusual hosts: slower, but it works in more
places.

Only documented variables of NCCL are set, and only where the person has not set them.
"""

from __future__ import annotations

import os
import shutil
import socket

_ENOUGH_SHARED_BYTES = 2**30

_SETTINGS = {
    # GPUs reach one another through host memory, and not directly over PCIe or NVLink, which virtual machines
    # and some boards break.
    "NCCL_P2P_DISABLE": "1",
    # One host needs no InfiniBand, and a container may see adapters that it cannot use.
    "NCCL_IB_DISABLE": "1",
    # Host memory comes from /dev/shm and not from CUDA's allocator, which asks for NUMA rights that Docker
    # withholds.
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}


def apply(one_host: bool = True) -> list[str]:
    """Set the variables in this process. Call before NCCL reads them.

    Args:
        one_host: whether all ranks are on this host, so that they need no interface but the loopback.

    Returns:
        The variables that were set, as 'NAME=value'.
    """
    settings = dict(_SETTINGS)
    if shutil.disk_usage("/dev/shm").free < _ENOUGH_SHARED_BYTES:
        # NCCL's buffers would not fit into /dev/shm, so that it uses sockets of this host instead.
        settings["NCCL_SHM_DISABLE"] = "1"
    if one_host and "lo" in [name for _, name in socket.if_nameindex()]:
        settings["NCCL_SOCKET_IFNAME"] = "lo"
    unset = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(unset)
    return [f"{name}={value}" for name, value in unset.items()]
