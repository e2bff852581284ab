"""The part of a rank that stays when the number of ranks changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbgpu.engine.process.rank_spec import RankSpec


def what_to_do(num_before: int, num_now: int, on_several_hosts: bool = False) -> str:
    """Say what a variable that belonged to the old group needs; the line that made it for the old number of
    ranks follows."""
    gone = ""
    if num_now < num_before and on_several_hosts:
        # A host that is lost need not have had the last ranks.
        gone = ", without what the lost ranks held of it"
    elif num_now < num_before:
        last = f" to {num_before - 1}" if num_before - num_now > 1 else ""
        gone = f", without what rank {num_now}{last} held of it"
    return (
        f"this belonged to the process group of {num_before} rank{'s'[: num_before > 1]}; make it again for "
        f"{num_now}{gone}. It was"
    )


def adopt_spec(before: RankSpec, spec: RankSpec, shell: InteractiveShell) -> None:
    """Apply what differs in the new spec of this rank: the names `rank` and `world_size`, torchrun's
    variables, threads, cores and memory limit.

    What the person has set to another value stays.

    Raises:
        ConfigError: the rank has more memory than the new limit allows.
    """
    import torch

    from nbgpu.engine.group import torch_settings
    from nbgpu.engine.ipykernel import input_requests
    from nbgpu.engine.memory import limit as memory_limit
    from nbgpu.engine.process import torchrun_variables
    from nbgpu.engine.variables import replicas
    from nbgpu.machine import numa

    assert spec.described == before.described, f"rank {before.rank} has another device"
    if spec.memory_limit_bytes is not None and spec.memory_limit_bytes != before.memory_limit_bytes:
        memory_limit.enforce(spec.memory_limit_bytes, torch.device(spec.device))
    numa.follow(spec.binding)
    if torch.get_num_threads() == before.threads:
        torch.set_num_threads(spec.threads)
    torch_settings.note_threads(spec.threads)
    if os.environ.get("OMP_NUM_THREADS") == str(before.threads):
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    torchrun_variables.set_for(spec)
    for name, then, now in (
        ("rank", before.rank, spec.rank),
        ("world_size", before.world_size, spec.world_size),
    ):
        given = shell.user_ns.get(name)
        if type(given) is int and given == then:
            shell.push({name: now}, interactive=False)
    if spec.rank != before.rank:
        input_requests.follow(Path(spec.folder), spec.rank)
    replicas.report_again()
