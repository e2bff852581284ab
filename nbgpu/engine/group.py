"""The process group of the ranks, and its generations.

A generation is one forming of the group. Each has a rendezvous of its own, a file in the cluster's private
folder, so that nothing left over from an earlier group can be mistaken for news of this one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Membership:
    """This process's place in the group."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


_membership: Membership | None = None


def membership() -> Membership:
    """This process's place in the group that it formed last."""
    assert _membership is not None, "no group was formed in this process"
    return _membership


def form(
    member: Membership, rendezvous: Path | None, generation: int = 0, timeout: timedelta = DEFAULT_TIMEOUT
) -> None:
    """Forms the default process group and proves it with a real all_reduce on the rank's device.

    Args:
        member: this process's place.
        rendezvous: folder in which the ranks meet; only the user can enter it. A FileStore there is used and
            not a TCPStore, which listens on every interface of the host. None: as torchrun's environment says.
        generation: which forming of the group this is.
        timeout: of the collectives.

    Raises:
        RuntimeError: the all_reduce gave a wrong sum, or a peer did not come within the timeout.
    """
    global _membership
    store = None
    if rendezvous is not None:
        stay_on_loopback()
        store = dist.FileStore(str(rendezvous / f"group-generation-{generation}"), member.world_size)  # type: ignore[attr-defined]
    if member.device.type == "cuda":
        torch.cuda.set_device(member.device)
    dist.init_process_group(
        torch_backend(member.backend),
        store=store,
        rank=member.rank,
        world_size=member.world_size,
        timeout=timeout,
    )
    prove(member.world_size, member.device)
    _membership = member


def prove(world_size: int, device: torch.device) -> None:
    """One all_reduce of ones; RuntimeError unless every rank's one arrived exactly once."""
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != world_size:
        raise RuntimeError(f"all_reduce of ones gave {total.item()} with {world_size} ranks")


def torch_backend(backend: str) -> str:
    """The backend string for torch: with nccl, CPU tensors still go over gloo, which control messages need."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def stay_on_loopback() -> None:
    """Keeps gloo's and NCCL's sockets on the loopback interface, unless the person named another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
