"""What the trained model does with the samples of the result, shared out over the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbgpu.engine.group import activity, exchange
from nbgpu.engine.group.group import Membership
from nbgpu.engine.model.strategy import Strategy
from nbgpu.engine.training.validation import each_alone
from nbgpu.engine.workload.recipe import Evaluated

_PERIOD_S = 0.5
"""The least time between two records of how far a rank has come."""


def evaluate(
    recipe: Evaluated,
    model: nn.Module,
    strategy: Strategy,
    device: torch.device,
    member: Membership,
    chunk_size: int,
    tell: Callable[[int, int], None],
) -> list[Any]:
    """Return what the recipe's `evaluate` gives for every sample of the result, in order, on every rank.

    A collective, inside `evaluating`. Raises on every rank if a share failed on any, as `together` does.

    Args:
        recipe: names the samples and evaluates them.
        model: the trained model.
        strategy: how it is spread over the ranks.
        device: the rank's device.
        member: the rank's place in the group.
        chunk_size: the number of samples that are evaluated at a time.
        tell: receives now and then how many samples of how many this rank has evaluated.
    """
    samples = recipe.samples_of_result()
    own = samples[member.rank :: member.world_size]
    share = each_alone(strategy, lambda: _share(recipe, model, device, own, chunk_size, tell))
    shares: list[list[Any]] = exchange.gather(share)
    evaluated: list[Any] = [None] * len(samples)
    for rank, of_rank in enumerate(shares):
        evaluated[rank :: member.world_size] = of_rank
    return evaluated


def _share(
    recipe: Evaluated,
    model: nn.Module,
    device: torch.device,
    samples: Sequence[Any],
    chunk_size: int,
    tell: Callable[[int, int], None],
) -> list[Any]:
    found: list[Any] = []
    told_s = -_PERIOD_S
    with activity.during("working out the result"):
        for first in range(0, len(samples), chunk_size):
            if time.monotonic() - told_s >= _PERIOD_S:
                told_s = time.monotonic()
                tell(first, len(samples))
            found += recipe.evaluate(model, device, samples[first : first + chunk_size])
    tell(len(samples), len(samples))
    return found
