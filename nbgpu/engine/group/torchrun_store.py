"""The store in which ranks that torchrun started meet: torchrun's own, and in it a part for this start alone.

torchrun keeps one store for all its restarts (pytorch/pytorch issues 135712 and 167288). The addresses of
ranks that have ended still stand in it, so that a rank that reads one before its owner's successor has
written its own connects to nobody, or waits for good. The number of the restart, which torchrun gives in
TORCHELASTIC_RESTART_COUNT, does not tell the starts apart: each host counts its own.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nbgpu.text.ranks import named_ranks

_POLL_S = 0.01


def of_this_start(rank: int, world_size: int, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """Return the store that torchrun's environment names, without what earlier ranks left in it.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    return part_of_this_start(store, rank, world_size, timeout)


def part_of_this_start(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> dist.Store:  # type: ignore[name-defined]
    """Return a part of a store that the ranks of this start share, and no rank of an earlier one does.

    Each process has a random name of its own, and asks rank 0 under it. Rank 0 may read the name of a process
    that has ended; it then answers that too, which nobody hears, and reads again until the rank's own process
    says that it has the answer.

    Args:
        store: one that all starts share. No process of an earlier start still uses it.
        rank: this process's.
        world_size: the number of ranks.
        timeout: how long the ranks wait for one another.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    own_name = secrets.token_hex(16)
    if rank == 0:
        _answer(store, own_name, set(range(1, world_size)), timeout)
        return dist.PrefixStore(own_name, store)  # type: ignore[attr-defined]
    store.set(_name_of(rank), own_name)
    try:
        store.wait([_answer_to(own_name)], timeout)
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {rank} found no rank 0 in torchrun's store within {timeout.total_seconds():g} s"
        ) from error
    part = store.get(_answer_to(own_name)).decode()
    store.set(_has_heard(rank, part), "")
    return dist.PrefixStore(part, store)  # type: ignore[attr-defined]


def _answer(
    store: dist.Store,  # type: ignore[name-defined]
    part: str,
    absent: set[int],
    timeout: timedelta,
) -> None:
    """Tell each absent rank the name of this start's part of the store, until all have heard it."""
    give_up_s = time.monotonic() + timeout.total_seconds()
    while absent:
        for rank in sorted(absent):
            if store.check([_name_of(rank)]):
                store.set(_answer_to(store.get(_name_of(rank)).decode()), part)
        absent -= {rank for rank in absent if store.check([_has_heard(rank, part)])}
        if absent and time.monotonic() > give_up_s:
            raise RuntimeError(
                f"{named_ranks(sorted(absent))} did not come to torchrun's store within "
                f"{timeout.total_seconds():g} s"
            )
        time.sleep(_POLL_S)


def _name_of(rank: int) -> str:
    return f"nbgpu/name/{rank}"


def _answer_to(name: str) -> str:
    return f"nbgpu/answer/{name}"


def _has_heard(rank: int, part: str) -> str:
    return f"nbgpu/heard/{part}/{rank}"
