"""Estimates a run: the amount of data, and the memory of a rank, without allocating it."""

from __future__ import annotations

from typing import Any

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine.dry_run import fake_steps
from nbgpu.engine.dry_run.steps import without_exchange
from nbgpu.engine.group import group, torch_settings
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory import usage
from nbgpu.engine.model import randomness
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.problem import Problem
from nbgpu.errors import DataError


@torch_settings.as_at_the_beginning()
def estimate_run(settings: dict[str, Any]) -> dict[str, Any]:
    """Return an estimate for one rank, which is the same for every rank. No collective.

    Args:
        settings: all fields of a TrainConfig.

    Returns:
        `data`: the recipe's `amount`, or `unknown` with the problem of the data. `memory`: in bytes
        the tensors at the peak by category (`nbgpu.engine.memory.allocations`), `before` (already held by the
        process) and `peak`; or `unknown` with the reason.
    """
    config = train_config(**settings)
    recipe: Any = by_name.load(config)
    if isinstance(recipe, Problem):
        return _estimate_problem(recipe)
    return {"data": _data(config), "memory": memory(config)}


def _estimate_problem(problem: Problem) -> dict[str, Any]:
    """Return the estimate for a problem, which has a goal in place of samples."""
    try:
        problem.load()
    except DataError as error:
        return {"data": {"unknown": str(error)}, "memory": {"unknown": "the data cannot be used"}}
    member = group.membership()
    parts = problem.memory_bytes(member.world_size)
    parts["before"] = usage.Usage.of(member.device).used_bytes
    return {"data": {"unknown": "\n".join(problem.summary)}, "memory": {**parts, "peak": sum(parts.values())}}


def _data(config: TrainConfig) -> dict[str, Any]:
    try:
        return {"amount": by_name.load(config).amount()}
    except DataError as error:
        return {"unknown": str(error)}


def memory(config: TrainConfig) -> dict[str, Any]:
    """Return the memory of a rank, as `estimate_run` does."""
    member = group.membership()
    config = without_exchange(config)
    with memory_limit.lifted(), randomness.of_run(config):
        try:
            parts = fake_steps.parts(config, member.device, member.world_size)
        except Exception as error:  # noqa: BLE001 - a model that reads values cannot run on shapes alone
            return {"unknown": f"{type(error).__name__}: {error}".splitlines()[0]}
        finally:
            usage.free()
    parts["before"] = usage.Usage.of(member.device).used_bytes
    return {**parts, "peak": sum(parts.values())}
