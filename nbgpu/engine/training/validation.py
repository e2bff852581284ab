"""Evaluates the model on held-out samples: the recipe's values, averaged over the samples of all ranks or
judged together, and what it makes of the samples of the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.data.batches import StepBatches
from nbgpu.engine.group import activity, exchange
from nbgpu.engine.group.consensus import together
from nbgpu.engine.group.group import Membership
from nbgpu.engine.model import precision
from nbgpu.engine.model.state import State
from nbgpu.engine.model.strategy import Strategy
from nbgpu.engine.workload.recipe import Batch, Evaluated, Judge, Pictured, Recipe

Result = TypeVar("Result")
Values = TypeVar("Values")


_REPORT_PERIOD_S = 0.5
"""The least time between two reports of the progress of an evaluation."""


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
    """Call `work` on every rank; return this rank's result, or raise on every rank if it failed on any. A
    collective, inside `evaluating`.

    `work` may call the model a different number of times on each rank. With fsdp each forward pass is a
    collective: `strategy.each_alone` has ranks that are done with their work take part in those of others.
    """
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
    """Return the means of the recipe's `validate` over the held-out samples of all ranks, by name, or the
    result of the recipe's `judge`; the same on every rank. A collective.

    The result is empty if no rank has a held-out sample. If the recipe raises on one rank, every rank raises.

    Args:
        recipe: computes the values of a batch.
        state: has the model, and the averaged weights if there are any.
        strategy: how the model is distributed over the ranks.
        step_batches: has the rank's held-out samples.
        config: the settings.
        device: the rank's device.
        show: on the rank that shows them, receives the pictures of a recipe that has some.
    """

    def on_batches(method: Callable[[nn.Module, Batch], Values], most: int | None = None) -> Iterator[Values]:
        """Yield what a method of the recipe returns for each of this rank's held-out batches, or for the
        first `most` of them."""
        for batch in islice(step_batches.loaders.val, most):
            with torch.no_grad(), precision.autocast(config, device):
                values = method(state.model, step_batches.to_device(batch))
            # Outside of autocast, which would otherwise stay on in the caller until the next batch.
            yield values

    def show_pictures(pictured: Pictured) -> None:
        """Show the pictures of this rank's first held-out batch: the same samples in each validation."""
        if show is not None:
            for pictures in on_batches(pictured.pictures, most=1):
                show(pictures)

    with evaluating(state, strategy):
        if isinstance(recipe, Pictured):
            each_alone(strategy, lambda: show_pictures(recipe))
        if isinstance(recipe, Judge):
            return _judged(recipe, each_alone(strategy, lambda: _local_values(on_batches(recipe.validate))))
        local_sums = each_alone(strategy, lambda: _local_sums(on_batches(recipe.validate)))
    # A rank without samples does not know the names of the values.
    gathered: list[tuple[dict[str, float], int]] = exchange.gather(local_sums)
    num_samples = sum(count for _, count in gathered)
    names = dict.fromkeys(name for sums, _ in gathered for name in sums)
    return {name: sum(sums.get(name, 0.0) for sums, _ in gathered) / num_samples for name in names}


def _local_sums(by_batch: Iterable[Mapping[str, Tensor]]) -> tuple[dict[str, float], int]:
    """Return the sums of the recipe's values over this rank's held-out samples, and the number of samples.

    Args:
        by_batch: the result of the recipe's `validate` for each batch.
    """
    sums: dict[str, float] = {}
    num_samples = 0
    for values in by_batch:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value.double().sum())
        num_samples += len(next(iter(values.values())))
    return sums, num_samples


def _local_values(by_batch: Iterable[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    """Return the recipe's values by name, for each of this rank's held-out samples.

    Args:
        by_batch: the result of the recipe's `validate` for each batch.
    """
    by_name: dict[str, list[float]] = {}
    for values in by_batch:
        for name, value in values.items():
            by_name.setdefault(name, []).extend(value.double().tolist())
    return by_name


def _judged(recipe: Judge, local_values: dict[str, list[float]]) -> dict[str, float]:
    """Gather the values of all samples on every rank, in order of rank, and return the recipe's judgement of
    them, such as an AUC, which is no mean over samples. A collective.

    Args:
        recipe: judges the values.
        local_values: the result of `_local_values` on this rank.
    """
    gathered: dict[str, list[float]] = {}
    for values_by_name in exchange.gather(local_values):
        for name, values in values_by_name.items():
            gathered.setdefault(name, []).extend(values)
    return recipe.judge(gathered) if gathered else {}


def evaluate(
    recipe: Evaluated,
    model: nn.Module,
    strategy: Strategy,
    device: torch.device,
    member: Membership,
    chunk_size: int,
    report: Callable[[int, int], None],
) -> list[Any]:
    """Call the recipe's `evaluate` for every sample of the result, where rank r takes the samples r, r +
    world_size, …; return the results in the order of the samples, on every rank.

    A collective, inside `evaluating`. If the recipe raises on one rank, every rank raises.

    Args:
        recipe: names the samples and evaluates them.
        model: the trained model.
        strategy: how it is spread over the ranks.
        device: the rank's device.
        member: the rank's place in the group.
        chunk_size: the number of samples that are evaluated at a time.
        report: receives the progress from time to time: (the number of samples that this rank has evaluated,
            the number of all of its samples).
    """
    all_samples = recipe.samples_of_result()
    samples = all_samples[member.rank :: member.world_size]

    def evaluate_share() -> list[Any]:
        """Evaluate this rank's samples, and report the progress."""
        results: list[Any] = []
        # Each report is a record in the run's file, so that they are limited to one per period.
        reported_s = -_REPORT_PERIOD_S
        with activity.during("working out the result"):
            for first in range(0, len(samples), chunk_size):
                if time.monotonic() - reported_s >= _REPORT_PERIOD_S:
                    reported_s = time.monotonic()
                    report(first, len(samples))
                results += recipe.evaluate(model, device, samples[first : first + chunk_size])
        report(len(samples), len(samples))
        return results

    shares: list[list[Any]] = exchange.gather(each_alone(strategy, evaluate_share))
    # Rank r has evaluated the samples r, r + world_size, …: the slices put the results back in that order.
    evaluated: list[Any] = [None] * len(all_samples)
    for rank, share in enumerate(shares):
        evaluated[rank :: member.world_size] = share
    return evaluated
