"""Steps of a run on generated batches, on this rank alone, which need the same memory as the run itself.

No gradient is exchanged, so that no rank waits for one that runs out of memory. The memory that DDP holds for
the exchange is held all the same.
"""

from __future__ import annotations

import math
from importlib import import_module

import torch
from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.model import build as models
from nbgpu.engine.model import optimizers, precision
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.workload.recipe import Recipe

_NUM_PREFETCHED = 2
"""The number of batches that wait in host memory while another one is used."""


def without_exchange(config: TrainConfig) -> TrainConfig:
    """Return the settings without options that need other ranks, or that take long and hardly change the
    memory."""
    return config.changed(sync_batchnorm=False, compile=False)


def import_trainer() -> None:
    """Import all code that a run will use, so that a measurement before the run includes its memory."""
    with memory_limit.lifted():  # an import that runs out of memory leaves half a module behind
        import_module("nbgpu.engine.train")


class DryRun:
    """The model, optimizer and discriminator of a run, as one rank has them.

    Args:
        config: the result of `without_exchange`; its `batch_size` is not used.
        device: the rank's device.
        recipe: the recipe of the settings.
        model, discriminator: used in place of those that would be built here.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        recipe: Recipe,
        model: nn.Module | None = None,
        discriminator: Discriminator | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self.recipe = recipe
        self.model = model or models.build(config, self.recipe, device)[0]
        self._discriminator = discriminator or Discriminator.of(config, self.recipe, device)
        self.optimizer = optimizers.make(config, self.model.parameters())
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
        self._buckets: list[Tensor] = []
        if config.strategy == "ddp":
            trained = [p for p in self.model.parameters() if p.requires_grad]
            # Gradients are in DDP's buckets from the start, or are copied there.
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            if not config.gradient_as_bucket_view:
                self._buckets = [torch.zeros_like(parameter) for parameter in trained]

    def step(self, batch_size: int) -> None:
        """Take one optimizer step, with all memory that a run would hold."""
        config = self._config
        num_waiting = _NUM_PREFETCHED if self._device.type == "cpu" else 0
        batches = [
            {name: self._ready(value) for name, value in self.recipe.example(batch_size).items()}
            for _ in range(config.accumulate + num_waiting)
        ]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        # A third micro-batch would need no more memory than two.
        rival = self._discriminator
        loss_of = self.recipe.loss if rival is None else rival.loss_of_model
        for batch in batches[: min(2, config.accumulate)]:
            with precision.autocast(config, self._device):
                loss = loss_of(self.model, batch)["loss"]
            self._scaler.scale(loss / config.accumulate).backward()
            if rival is not None:
                rival.learn(self._scaler)
        self._scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm or math.inf)
        self._scaler.step(self.optimizer)
        if rival is not None:
            self._scaler.step(rival.optimizer)
        self._scaler.update()
        self.forget_gradients()
        del buffers

    def forget_gradients(self) -> None:
        """Reset the gradients, as after a step, even after an interrupted one."""
        self.optimizer.zero_grad(set_to_none=self._config.strategy != "ddp")
        if self._discriminator is not None:
            self._discriminator.forget_gradients()

    def _ready(self, value: Tensor) -> Tensor:
        """Return a tensor of a batch as the StepBatches gives it."""
        dtype = precision.dtype(self._config) if value.is_floating_point() else value.dtype
        value = value.to(self._device, dtype)
        if self._config.channels_last and value.dim() == 5:
            value = value.to(memory_format=torch.channels_last_3d)
        return value
