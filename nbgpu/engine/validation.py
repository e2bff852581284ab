"""What the model is worth on held-out samples: the recipe's values, averaged over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice

import torch

from nbgpu.config import TrainConfig
from nbgpu.engine import exchange, precision
from nbgpu.engine.consensus import together
from nbgpu.engine.feed import Feed
from nbgpu.engine.state import State
from nbgpu.engine.strategy import Strategy
from nbgpu.recipes import Pictured, Recipe


@contextmanager
def evaluating(state: State, strategy: Strategy) -> Iterator[None]:
    """In it each rank can use the whole model with no other, with the averaged weights if there are any."""
    average = state.average
    with nullcontext() if average is None else average.in_the_model(), strategy.whole():
        state.model.eval()
        try:
            yield
        finally:
            state.model.train()


def validate(
    recipe: Recipe,
    state: State,
    strategy: Strategy,
    feed: Feed,
    config: TrainConfig,
    device: torch.device,
    show: Callable[[dict[str, str]], None] | None = None,
) -> dict[str, float]:
    """The means of what the recipe's `validate` gives, by name; the same on every rank. A collective.

    Empty where no rank has a held-out sample. Raises on every rank if a share failed on any, as `together` does.

    Args:
        show: on the rank that shows them, takes the pictures of a recipe that has some.
    """
    with evaluating(state, strategy):
        if isinstance(recipe, Pictured):
            together(lambda: None if show is None else _show(recipe, state, feed, config, device, show))
        own = together(lambda: _own_share(recipe, state, feed, config, device))
    # A rank may have had no sample, and so not know the names.
    gathered: list[tuple[dict[str, float], int]] = exchange.gather(own)
    num_samples = sum(count for _, count in gathered)
    names = dict.fromkeys(name for sums, _ in gathered for name in sums)
    return {name: sum(sums.get(name, 0.0) for sums, _ in gathered) / num_samples for name in names}


@torch.no_grad()
def _show(
    recipe: Pictured,
    state: State,
    feed: Feed,
    config: TrainConfig,
    device: torch.device,
    show: Callable[[dict[str, str]], None],
) -> None:
    """Shows what the recipe draws of this rank's first held-out batch: the same samples in each validation."""
    for batch in islice(feed.loaders.val, 1):
        with precision.autocast(config, device):
            show(recipe.pictures(state.model, feed.to_device(batch)))


@torch.no_grad()
def _own_share(
    recipe: Recipe, state: State, feed: Feed, config: TrainConfig, device: torch.device
) -> tuple[dict[str, float], int]:
    """The sums of the recipe's values over this rank's held-out samples, and how many there are."""
    sums: dict[str, float] = {}
    num_samples = 0
    for batch in feed.loaders.val:
        with precision.autocast(config, device):
            values = recipe.validate(state.model, feed.to_device(batch))
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value.double().sum())
        num_samples += len(next(iter(values.values())))
    return sums, num_samples
