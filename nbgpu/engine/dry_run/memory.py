"""The memory of a run's steps by category: measured on real ranks, predicted for any number of them, and
estimated together with the amount of data before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine.dry_run import fake_steps
from nbgpu.engine.dry_run.steps import DryRun, without_exchange
from nbgpu.engine.group import group, torch_settings
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory import usage
from nbgpu.engine.memory.trace import MemoryTrace, trace_memory
from nbgpu.engine.model import precision, randomness, strategy
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.problem import Problem
from nbgpu.errors import DataError

_NUM_STEPS = 3
"""The optimizer's state is only there after the first step, and DDP forms its buckets again in the second."""


@torch_settings.as_at_the_beginning()
def measure(settings: dict[str, Any], with_data: bool) -> dict[str, Any]:
    """Measure the memory of steps on generated batches, with the exchange of gradients. A collective.

    The steps are taken twice: once to measure the process, and once to see which tensors hold the memory.

    Args:
        settings: all fields of a TrainConfig.
        with_data: whether to decode the volumes that the rank would keep, too.

    Returns:
        `tensors`: the bytes of each category at the peak of the tensors' memory; `before_bytes`: the memory
        of the process on the device before the steps; `peak_bytes`: its peak during the steps;
        `cached_bytes`: the host memory of the decoded volumes, None without `with_data`.
    """
    member = group.membership()
    config = train_config(**settings)
    device = member.device
    # Import it now, so that its memory does not count as that of the steps.
    with memory_limit.lifted():
        import_module("torch._dynamo")
    usage.free()
    before_bytes = usage.Usage.of(device).used_bytes
    try:
        with randomness.seeded_run(config), precision.kernels(config):
            usage.begin_peak(device)
            _take_steps(config, device, MemoryTrace())
            # What the allocator of a GPU keeps counts as used, too: nobody else gets it.
            peak_bytes = max(usage.peak_bytes(device), usage.Usage.of(device).reserved_bytes)
            usage.free()
            with trace_memory(device) as trace:
                _take_steps(config, device, trace)
    finally:
        usage.free()
    return {
        "tensors": trace.log.bytes_at_peak(),
        "before_bytes": before_bytes,
        "peak_bytes": peak_bytes,
        "cached_bytes": _cached_bytes(config, member) if with_data else None,
    }


def _cached_bytes(config: TrainConfig, member: group.Membership) -> int:
    """Return the bytes of the decoded volumes that this rank keeps in host memory."""
    loaders = by_name.load(config).build_loaders(member.rank, member.world_size, member.device)
    try:
        return loaders.cached_bytes()
    finally:
        loaders.close()
        usage.free()


def _take_steps(config: TrainConfig, device: torch.device, trace: MemoryTrace) -> None:
    """Take steps with the exchange of gradients; `trace` gets the use of each tensor. A collective."""
    recipe = by_name.load(config)
    with ExitStack() as stack:

        def spread(model: torch.nn.Module) -> strategy.Strategy:
            spread_model = strategy.spread(config, model, recipe.blocks(model), device)
            stack.callback(spread_model.close)
            return spread_model

        dry_run = DryRun(config, device, recipe, spread=spread, note=trace.note)
        for _ in range(_NUM_STEPS):
            dry_run.step(config.batch_size)
        dry_run.between_steps()


@torch_settings.as_at_the_beginning()
def predict(variants: Sequence[tuple[Mapping[str, Any], int]]) -> list[dict[str, Any]]:
    """Predict the memory of a step's tensors on one rank, from shapes alone: nothing is allocated. No
    collective.

    Args:
        variants: pairs of all fields of a TrainConfig, and a number of ranks.

    Returns:
        For each variant `tensors`, the bytes of each category at the peak, or `unknown` with the reason.
    """
    member = group.membership()
    predictions: list[dict[str, Any]] = []
    for settings, num_ranks in variants:
        config = without_exchange(train_config(**settings))
        tensors = _tensors_on_shapes(config, member.device, num_ranks)
        predictions.append(tensors if "unknown" in tensors else {"tensors": tensors})
    return predictions


def _tensors_on_shapes(config: TrainConfig, device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return the bytes of a step's tensors on one rank by category, or `unknown` with the reason."""
    try:
        # With `precision.kernels`, because some kernels of attention keep its scores, and others do not.
        with memory_limit.lifted(), randomness.seeded_run(config), precision.kernels(config):
            return {**fake_steps.parts(config, device, num_ranks)}
    except Exception as error:  # noqa: BLE001 - a model that reads values cannot run on shapes alone
        return {"unknown": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        usage.free()


@torch_settings.as_at_the_beginning()
def estimate_run(settings: dict[str, Any]) -> dict[str, Any]:
    """Estimate the amount of data of a run, and the memory that it takes on this rank. No collective.

    Ranks on equal devices differ only in the memory that the process already holds.

    Args:
        settings: all fields of a TrainConfig.

    Returns:
        `data`: `amount`, the recipe's, or `unknown`, the reason why there is none. A problem has no samples:
        `unknown` is then its summary, or the reason why its data cannot be used. `memory`: a dict as
        `run_memory` returns it.
    """
    config = train_config(**settings)
    recipe: Any = by_name.load(config)
    if isinstance(recipe, Problem):
        return _estimate_problem(recipe)
    data: dict[str, Any]
    try:
        data = {"amount": recipe.amount()}
    except DataError as error:
        data = {"unknown": str(error)}
    return {"data": data, "memory": run_memory(config)}


def _estimate_problem(problem: Problem) -> dict[str, Any]:
    """Return the result of `estimate_run` for a problem, which is minimised over one tensor and has no
    samples: its summary takes the place of the reason why the amount of data is unknown. The problem is
    loaded, because its memory and its summary depend on its data."""
    try:
        problem.load()
    except DataError as error:
        return {"data": {"unknown": str(error)}, "memory": {"unknown": "the data cannot be used"}}
    parts = problem.memory_bytes(group.membership().world_size)
    return {"data": {"unknown": "\n".join(problem.summary)}, "memory": _with_peak(parts)}


def held_bytes() -> int:
    """Return the bytes that this rank's process has on its device now."""
    return usage.Usage.of(group.membership().device).used_bytes


def _with_peak(parts: dict[str, int]) -> dict[str, int]:
    """Return the parts of a run's memory with `before`, which the process has already, and their sum."""
    parts = {**parts, "before": held_bytes()}
    return {**parts, "peak": sum(parts.values())}


def run_memory(config: TrainConfig) -> dict[str, Any]:
    """Estimate the memory of this rank in a run, from shapes alone.

    Returns:
        The bytes of tensors at the peak by category (`nbgpu.engine.memory.allocations`), `before` (already
        held by the process) and `peak`; or `unknown` with the reason.
    """
    member = group.membership()
    parts = _tensors_on_shapes(without_exchange(config), member.device, member.world_size)
    return parts if "unknown" in parts else _with_peak(parts)
