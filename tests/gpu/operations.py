"""Counts what a training step, or an evaluation of a search, computes and moves. Ranks import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write, each on its own, as in eager mode. No view does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            # What is changed in place is an input that is a result too.
            for tensor in tree_leaves((args, kwargs, result)):
                if isinstance(tensor, Tensor):
                    self.num_bytes += tensor.numel() * tensor.element_size()
        return result


def of_passes(recipe: str, settings: Mapping[str, Any], device: torch.device) -> tuple[int, int, float]:
    """Return the operations of products and convolutions of a step's passes, forward and backward, the bytes
    that all its operators move, and the seconds that it takes. The optimizer is left out."""
    from machine import seconds_of

    passes = _passes(recipe, settings, device)
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        passes()
    return flops.get_total_flops(), traffic.num_bytes, seconds_of(passes, device.type)


def _passes(recipe: str, settings: Mapping[str, Any], device: torch.device) -> Callable[[], object]:
    from nbgpu.config import train_config
    from nbgpu.engine.model import build, precision
    from nbgpu.engine.workload import by_name
    from nbgpu.engine.workload.problem import Problem

    config = train_config(recipe, **settings)
    work: Any = by_name.load(config)
    if isinstance(work, Problem):  # a search has no network
        work.load()
        last_stage = len(work.num_steps) - 1
        field = work.begin(last_stage, None).to(device)
        return lambda: work.evaluate(field, last_stage, 1, 0, 1)
    model = build.build(config, work, device)[0]
    batch = {name: tensor.to(device) for name, tensor in work.example(config.batch_size).items()}

    def passes() -> None:
        with precision.autocast(config, device):
            loss = work.loss(model, batch)["loss"]
        loss.backward()

    return passes
