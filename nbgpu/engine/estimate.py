"""What a run will take of a rank's memory, without taking it: two steps on tensors that have shapes and no numbers.

torch's FakeTensorMode works out every result's shape and type, and what of it lives is added up. Not in it: scratch
memory inside the kernels of cuDNN and oneDNN, what allocators round up and keep, and the data in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine import group, memory, memory_limit, models
from nbgpu.engine.minimiser import Problem
from nbgpu.engine.rehearsal import Rehearsal, load_recipe, rehearsed
from nbgpu.engine.train import own_randomness_and_threads
from nbgpu.errors import DataError

_NUM_STEPS = 2
"""The optimizer's state appears at the end of the first one."""


class _Living(TorchDispatchMode):
    """Adds up the storages that live, each once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self.now_bytes = self.peak_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = storage.nbytes()
                    self.now_bytes += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self.now_bytes)
                    weakref.finalize(storage, self._forget, key)
        return results

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._sizes.pop(key)


def of_run(settings: dict[str, Any]) -> dict[str, Any]:
    """An estimate for one rank; every rank's is the same. No collective.

    Args:
        settings: all fields of a TrainConfig.

    Returns:
        `data`: `amount`, as the recipe gives it, or `unknown`, with what is wrong with the data. `memory`: in bytes
        `parameters`, `gradients`, `optimizer`, `activations` (and all else that lives in a step), `before` (what the
        process holds already) and `peak`; `unknown` says why where it cannot be told.
    """
    config = train_config(**settings)
    recipe: Any = load_recipe(config)
    if isinstance(recipe, Problem):
        return _of_problem(recipe)
    return {"data": _data(config), "memory": _memory(config)}


def _of_problem(problem: Problem) -> dict[str, Any]:
    """What is looked for stands in the place of the data, which are no samples."""
    try:
        problem.load()
    except DataError as error:
        return {"data": {"unknown": str(error)}, "memory": {"unknown": "the data cannot be used"}}
    member = group.membership()
    parts = problem.memory_bytes(member.world_size)
    parts["before"] = memory.Usage.of(member.device).used_bytes
    return {"data": {"unknown": "\n".join(problem.told)}, "memory": {**parts, "peak": sum(parts.values())}}


def _data(config: TrainConfig) -> dict[str, Any]:
    try:
        return {"amount": load_recipe(config).amount()}
    except DataError as error:
        return {"unknown": str(error)}


def _memory(config: TrainConfig) -> dict[str, Any]:
    member = group.membership()
    config = rehearsed(config)
    with memory_limit.lifted(), own_randomness_and_threads(config):
        try:
            parts = _parts(config, member.device)
        except Exception as error:  # noqa: BLE001 - a model that looks at numbers cannot do without them
            return {"unknown": f"{type(error).__name__}: {error}".splitlines()[0]}
        finally:
            memory.free()
    if config.strategy == "fsdp":
        for name in ("parameters", "gradients", "optimizer"):
            parts[name] //= member.world_size
        # One block at a time is whole.
        parts["activations"] += parts["largest_block"]
    del parts["largest_block"]
    parts["before"] = memory.Usage.of(member.device).used_bytes
    return {**parts, "peak": sum(parts.values())}


def _empty(model: nn.Module, device: torch.device) -> None:
    """Puts parameters and buffers without numbers in the place of the model's own."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def _parts(config: TrainConfig, device: torch.device) -> dict[str, int]:
    # Its scaler asks whether there was an overflow, which only numbers can say.
    config = config.changed(amp="bf16") if config.amp == "fp16" else config
    model, _ = models.build(config, load_recipe(config), torch.device("cpu"))
    with FakeTensorMode(), _Living() as living:
        _empty(model, device)
        rehearsal = Rehearsal(config, device, model)
        # The weights, the first gradients, and where DDP has them stand twice its buckets.
        begun_bytes = living.now_bytes
        for _ in range(_NUM_STEPS):
            rehearsal.step(config.batch_size)
        static = memory.Static.of(rehearsal.model, rehearsal.optimizer, 0)
        blocks = [
            sum(p.nbytes for p in block.parameters()) for block in rehearsal.recipe.blocks(rehearsal.model)
        ]
        gradients = max(static.gradients_bytes, begun_bytes - static.parameters_bytes)
        return {
            "parameters": static.parameters_bytes,
            "gradients": gradients,
            "optimizer": static.optimizer_bytes,
            "activations": max(
                0, living.peak_bytes - static.parameters_bytes - gradients - static.optimizer_bytes
            ),
            "largest_block": max(blocks, default=0),
        }
