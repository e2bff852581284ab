"""Prepares the person's models under `fully_shard` and DTensors for further use, once their groups were made
again."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbgpu.engine.group import exchange, torch_private
from nbgpu.engine.variables.persons_objects import is_a, run_limited, walk_parameters
from nbgpu.engine.variables.user_groups import Owned

_reported: dict[str, list[int]] = {}
"""For each rank, by how many in-place changes a variable was ahead of the rank with the fewest, at the last
comparison; by the variable's name."""


def reset() -> list[str]:
    """Reset every model that `fully_shard` has sharded: drop the step that was cut short, and free the
    gathered weights. Have DTensors forget the meshes of groups that have ended.

    Returns:
        A line for each model that could not be reset.
    """
    torch_private.forget_layouts()
    lines = []
    for model in _models():
        _, problem = run_limited(model, functools.partial(torch_private.reset_sharded, model))
        if problem:
            lines.append(
                f"a {type(model).__name__} could not forget its last step ({problem}): make it again"
            )
    return lines


def _models() -> Iterator[Any]:
    """Yield each module of this process that `fully_shard` was applied to: models, and parts of models."""
    # fully_shard makes a class for each class of module.
    classes: list[type] = []
    for kind in torch_private.if_imported(*torch_private.FSDP_MODULE):
        classes += kind.__subclasses__()
    for model in gc.get_referrers(*classes) if classes else ():
        if is_a(model, tuple(classes)):
            yield model


def unequal(moved: list[Owned]) -> list[str]:
    """Return a line for each sharded variable that was changed in place a different number of times on
    different ranks. A collective.

    No rank has a copy of another rank's shard, so nothing can make such shards equal. Each difference is
    reported once.
    """
    changes_by_rank = exchange.gather({thing.name: _num_changes(thing.value) for thing in moved})
    lines = []
    for name in dict.fromkeys(itertools.chain.from_iterable(changes_by_rank)):
        counts = [changes[name] for changes in changes_by_rank if changes.get(name) is not None]
        ahead = [count - min(counts) for count in counts]
        if any(ahead) and _reported.get(name) != ahead:
            lines.append(
                f"the parts of {name} are not of one step on all ranks: load the last checkpoint, or make it again"
            )
        _reported[name] = ahead
    return lines


def _num_changes(value: Any) -> int | None:
    """Return how often a model or a DTensor was changed in place on this rank; None for other things."""
    kinds = torch_private.if_imported(*torch_private.DTENSOR)
    candidates = walk_parameters(value) if is_a(value, nn.Module) else [value]
    parts = [tensor for tensor in candidates if is_a(tensor, kinds)]
    return sum(map(torch_private.num_changes, parts)) if parts else None
