"""Two steps of a run on tensors with shapes but without values, to estimate the memory that they would need.

torch's FakeTensorMode computes every result's shape and type, and the sizes of the living tensors are added
up. Not included are scratch memory in the kernels of cuDNN and oneDNN, the overhead of allocators, and data
in host memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbgpu.config import TrainConfig
from nbgpu.engine.dry_run.steps import DryRun, without_exchange
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory.budget import Need, Static
from nbgpu.engine.model import build as models
from nbgpu.engine.model import precision
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.workload import by_name

_log = logging.getLogger("nbgpu.fake_steps")
_NUM_STEPS = 2
"""The optimizer's state is only there after the first step."""


class _Living(TorchDispatchMode):
    """Adds up the sizes of the living storages, each once."""

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


def _empty(model: nn.Module, device: torch.device) -> None:
    """Replace the model's parameters and buffers by tensors without values."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def parts(config: TrainConfig, device: torch.device, world_size: int) -> dict[str, int]:
    """Return the memory of one rank in bytes: `parameters`, `gradients`, `optimizer`, and `activations`.

    `activations` includes everything else in a step, such as a discriminator.

    Args:
        config: the result of `without_exchange`.
    """
    # The loss scaler of fp16 checks for overflow, which needs values.
    config = config.changed(amp="bf16") if config.amp == "fp16" else config
    recipe = by_name.load(config)
    model, _ = models.build(config, recipe, torch.device("cpu"))
    rival = Discriminator.of(config, recipe, torch.device("cpu"))
    # If the shapes come from a sample in a file, the file is read here, with its values.
    recipe.example(1)
    # Tensors that a recipe has read beside its model, such as the filters of a loss, have values.
    with FakeTensorMode(allow_non_fake_inputs=True), _Living() as living:
        _empty(model, device)
        if rival is not None:
            _empty(rival.network, device)
            rival = Discriminator(config, rival.recipe, rival.network, device)
        rival_bytes = sum(p.nbytes for p in rival.network.parameters()) if rival is not None else 0
        dry_run = DryRun(config, device, recipe, model, rival)
        # The weights, the first gradients, and with DDP twice the size of its buckets.
        begun_bytes = living.now_bytes - rival_bytes
        for _ in range(_NUM_STEPS):
            dry_run.step(config.batch_size)
        static = Static.of(dry_run.model, dry_run.optimizer, 0)
        blocks = [sum(p.nbytes for p in block.parameters()) for block in dry_run.recipe.blocks(dry_run.model)]
        gradients = max(static.gradients_bytes, begun_bytes - static.parameters_bytes)
        found = {
            "parameters": static.parameters_bytes,
            "gradients": gradients,
            "optimizer": static.optimizer_bytes,
            "activations": max(
                0, living.peak_bytes - static.parameters_bytes - gradients - static.optimizer_bytes
            ),
        }
    if config.strategy == "fsdp":
        for name in ("parameters", "gradients", "optimizer"):
            found[name] //= world_size
        # Only one block at a time is gathered.
        found["activations"] += max(blocks, default=0)
    return found


def need_of(config: TrainConfig, world_size: int) -> Need | None:
    """Return the memory of a run's steps for any batch size; None if it cannot be computed without values.

    This uses torch's device 'meta' and not FakeTensorMode as `parts` does, because its imports take seconds
    in which other ranks wait for the report of a failure. 'meta' has no autocast, so that with `amp` the
    memory is overestimated.
    """
    config = without_exchange(config)
    try:
        with memory_limit.lifted():
            recipe = by_name.load(config)
            model = models.build(config, recipe, torch.device("cpu"))[0].to("meta")
            rival = Discriminator.of(config, recipe, torch.device("meta"))
            one_bytes, two_bytes = (_activations(config, model, rival, batch_size) for batch_size in (1, 2))
    except Exception as error:  # noqa: BLE001 - a model that reads values cannot run on shapes alone
        _log.info("the memory of a step cannot be computed: %r", error)
        return None
    # Weights, gradients, and the optimizer's two moments.
    state_bytes = 4 * sum(p.nbytes for p in model.parameters())
    if config.strategy == "fsdp":
        state_bytes //= world_size
    if rival is not None:
        state_bytes += 4 * sum(p.nbytes for p in rival.network.parameters())
    return Need(state_bytes + max(0, 2 * one_bytes - two_bytes), max(1, two_bytes - one_bytes))


def _activations(config: TrainConfig, model: nn.Module, rival: Discriminator | None, batch_size: int) -> int:
    """Return the peak memory of forward and backward in bytes, without the model, which is on the device
    'meta'."""
    recipe = by_name.load(config)
    dtype = precision.dtype(config)
    with _Living() as living:
        batch = {
            name: torch.empty(
                (batch_size, *value.shape[1:]),
                dtype=dtype if value.is_floating_point() else value.dtype,
                device="meta",
            )
            for name, value in recipe.example(1).items()
        }
        loss_of = recipe.loss if rival is None else rival.loss_of_model
        loss_of(model, batch)["loss"].backward()
        if rival is not None:
            rival.forget_gradients()
    model.zero_grad(set_to_none=True)
    peak_bytes: int = living.peak_bytes
    return peak_bytes
