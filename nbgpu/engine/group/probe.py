"""Reports the features of this build of torch, and tries whether processes on this host can form a group.

    python -m nbgpu.engine.group.probe about
    python -m nbgpu.engine.group.probe reduce FOLDER RANK WORLD_SIZE BACKEND DEVICE

`nbgpu doctor` runs each in a process of its own: the doctor does not import torch, and a probe that hangs or
crashes can be ended from outside. The answer is one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from nbgpu.engine.group import group
from nbgpu.engine.group.group import Membership


def about() -> dict[str, Any]:
    """Return what this build of torch supports, and how many GPUs it sees. Touches no GPU."""
    has_nccl = dist.is_nccl_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "gloo": dist.is_gloo_available(),
        "num_gpus": torch.cuda.device_count(),
        "architectures": torch.cuda.get_arch_list(),
    }


def reduce(folder: str, rank: str, world_size: str, backend: str, device: str) -> dict[str, Any]:
    """Form a group with the other processes that meet in the folder, and prove it with an all_reduce."""
    member = Membership(int(rank), int(world_size), int(rank), torch.device(device), backend)
    began_s = time.perf_counter()
    # These processes have no controller that could serve the cluster's store.
    group.form(member, dist.FileStore(f"{folder}/meeting", member.world_size))  # type: ignore[attr-defined]
    formed_s = time.perf_counter() - began_s
    # A megabyte. The first collective, which sets up the connections, was a part of `form`.
    values = torch.ones(2**18, dtype=torch.float32, device=member.device)
    began_s = time.perf_counter()
    dist.all_reduce(values)
    wrong = bool((values != member.world_size).any())
    reduced_s = time.perf_counter() - began_s
    dist.destroy_process_group()
    return {"ok": not wrong, "form_s": formed_s, "all_reduce_s": reduced_s}


if __name__ == "__main__":
    question, *arguments = sys.argv[1:]
    answer = about() if question == "about" else reduce(*arguments)
    # On a line of its own, whatever NCCL has logged before.
    print(f"\n{json.dumps(answer)}", flush=True)  # noqa: T201 - the answer
    # A thread of gloo that still releases the all_reduce would abort an interpreter that ends normally.
    os._exit(0)
