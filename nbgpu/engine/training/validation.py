"""Evaluates the model on held-out samples: the recipe's values, averaged over the samples of all ranks or
judged together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TypeVar

import torch

from nbgpu.config import TrainConfig
from nbgpu.engine.data.batches import StepBatches
from nbgpu.engine.group import exchange
from nbgpu.engine.group.consensus import together
from nbgpu.engine.model import precision
from nbgpu.engine.model.state import State
from nbgpu.engine.model.strategy import Strategy
from nbgpu.engine.workload.recipe import Judge, Pictured, Recipe

Result = TypeVar("Result")


@contextmanager
def evaluating(state: State, strategy: Strategy) -> Iterator[None]:
    """Let `each_alone` use the model inside the context, with the averaged weights if there are any."""
    average = state.average
    with nullcontext() if average is None else average.in_the_model(), strategy.evaluating():
        state.model.eval()
        try:
            yield
        finally:
            state.model.train()


def each_alone(strategy: Strategy, work: Callable[[], Result]) -> Result:
    """Do this rank's share of some work with the model, as often as it likes, and raise on every rank if a
    share failed on any, as `together` does. A collective, inside `evaluating`."""
    return together(lambda: strategy.each_alone(work))


def validate(
    recipe: Recipe,
    state: State,
    strategy: Strategy,
    step_batches: StepBatches,
    config: TrainConfig,
    device: torch.device,
    show: Callable[[dict[str, str]], None] | None = None,
) -> dict[str, float]:
    """Return the means of the values of the recipe's `validate`, by name, or the result of its `judge`; the
    same on every rank. A collective.

    The result is empty if no rank has a held-out sample. Raises on every rank if a share failed on any, as
    `together` does.

    Args:
        show: on the rank that shows them, receives the pictures of a recipe that has some.
    """
    with evaluating(state, strategy):
        if isinstance(recipe, Pictured):
            each_alone(
                strategy,
                lambda: None if show is None else _show(recipe, state, step_batches, config, device, show),
            )
        if isinstance(recipe, Judge):
            values = each_alone(strategy, lambda: _local_values(recipe, state, step_batches, config, device))
            return _judged(recipe, values)
        own = each_alone(strategy, lambda: _local_sums(recipe, state, step_batches, config, device))
    # A rank may have had no sample, and then does not know the names.
    gathered: list[tuple[dict[str, float], int]] = exchange.gather(own)
    num_samples = sum(count for _, count in gathered)
    names = dict.fromkeys(name for sums, _ in gathered for name in sums)
    return {name: sum(sums.get(name, 0.0) for sums, _ in gathered) / num_samples for name in names}


@torch.no_grad()
def _show(
    recipe: Pictured,
    state: State,
    step_batches: StepBatches,
    config: TrainConfig,
    device: torch.device,
    show: Callable[[dict[str, str]], None],
) -> None:
    """Show the recipe's pictures of this rank's first held-out batch: the same samples in each validation."""
    for batch in islice(step_batches.loaders.val, 1):
        with precision.autocast(config, device):
            show(recipe.pictures(state.model, step_batches.to_device(batch)))


def _local_sums(
    recipe: Recipe, state: State, step_batches: StepBatches, config: TrainConfig, device: torch.device
) -> tuple[dict[str, float], int]:
    """Return the sums of the recipe's values over this rank's held-out samples, and the number of samples."""
    sums: dict[str, float] = {}
    num_samples = 0
    for values in _batches(recipe, state, step_batches, config, device):
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value.double().sum())
        num_samples += len(next(iter(values.values())))
    return sums, num_samples


def _local_values(
    recipe: Recipe, state: State, step_batches: StepBatches, config: TrainConfig, device: torch.device
) -> dict[str, list[float]]:
    """Return the recipe's values for each of this rank's held-out samples."""
    own: dict[str, list[float]] = {}
    for values in _batches(recipe, state, step_batches, config, device):
        for name, value in values.items():
            own.setdefault(name, []).extend(value.double().tolist())
    return own


@torch.no_grad()
def _batches(
    recipe: Recipe, state: State, step_batches: StepBatches, config: TrainConfig, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    for batch in step_batches.loaders.val:
        with precision.autocast(config, device):
            values = recipe.validate(state.model, step_batches.to_device(batch))
        yield values


def _judged(recipe: Judge, own: dict[str, list[float]]) -> dict[str, float]:
    everyone: list[dict[str, list[float]]] = exchange.gather(own)
    names = dict.fromkeys(name for values in everyone for name in values)
    gathered = {name: [value for values in everyone for value in values.get(name, [])] for name in names}
    return recipe.judge(gathered) if gathered else {}
