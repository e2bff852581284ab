"""How far the clocks of the ranks' hosts are apart, estimated by messages there and back.

A rank notes when it asks and when the answer is there; rank 0 answers with its own time. Its clock then
showed that time at some moment in between, so that half of the time between is the largest possible error.
The quickest of some messages counts (Cristian 1989, "Probabilistic clock synchronization").
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from nbgpu.engine.group import exchange

_NUM_MESSAGES = 20


def offsets(now: Callable[[], float] = time.monotonic) -> list[tuple[float, float]]:
    """Return for each rank what to add to its clock to get that of rank 0, and the largest error, in seconds.

    A collective.

    Args:
        now: reads this rank's clock.
    """
    message = torch.zeros(1, dtype=torch.float64, device="cpu")
    offset = (0.0, 0.0)
    for rank in range(1, dist.get_world_size()):
        if dist.get_rank() == 0:
            for _ in range(_NUM_MESSAGES):
                dist.recv(message, rank)
                message[0] = now()
                dist.send(message, rank)
        elif dist.get_rank() == rank:
            offset = min((_ask(message, now) for _ in range(_NUM_MESSAGES)), key=lambda answer: answer[1])
    return [(float(offset_s), float(error_s)) for offset_s, error_s in exchange.gather(offset)]


def _ask(message: torch.Tensor, now: Callable[[], float]) -> tuple[float, float]:
    """Ask rank 0 for its time; return (what to add to this rank's clock, the largest error)."""
    asked_s = now()
    dist.send(message, 0)
    dist.recv(message, 0)
    answered_s = now()
    return float(message[0]) - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2
