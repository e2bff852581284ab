"""Gives every process another name of its host, as far as NCCL is concerned.

NCCL refuses two ranks on one GPU: it compares the hash of the host's name and the number of the device. With
another NCCL_HOSTID in each process it takes them for GPUs of two hosts, which talk over sockets. That is slow
and real. Python imports this module at its start if its folder is in PYTHONPATH; engines are forked, so that
the name is made again after a fork.
"""

import os


def _name_host() -> None:
    os.environ["NCCL_HOSTID"] = f"nbgpu-check-{os.getpid()}"


_name_host()
os.register_at_fork(after_in_child=_name_host)
