"""Takes optimizer steps on generated batches that need the same memory as the steps of a run.

By default no gradient is exchanged, so that no rank waits for one that runs out of memory. The memory that
DDP holds for the exchange is allocated all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.dry_run.fake_shards import FakeShards
from nbgpu.engine.memory import allocations
from nbgpu.engine.model import build as models
from nbgpu.engine.model import optimizers, precision
from nbgpu.engine.model.averaging import Average
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.model.parameter_groups import GroupedOptimizer
from nbgpu.engine.model.strategy import Strategy, clip, own_part
from nbgpu.engine.workload.recipe import Recipe

_NUM_PREFETCHED = 2
"""The number of batches that wait in host memory while another one is used."""


def without_exchange(config: TrainConfig) -> TrainConfig:
    """Return the settings without options that need other ranks, or that take long and hardly change the
    memory."""
    return config.changed(sync_batchnorm=False, compile=False)


class Unexchanged(Strategy):
    """A strategy that exchanges nothing, and holds the memory that DDP holds for the exchange: gradients that
    stay allocated as views of buckets, or buckets in addition to the gradients.

    Args:
        config: the settings, with the strategy.
        model: the model on the device.
    """

    def __init__(self, config: TrainConfig, model: nn.Module) -> None:
        self.replica = model
        self.keeps_gradients = config.strategy == "ddp" and config.gradient_as_bucket_view
        trained = [p for p in model.parameters() if p.requires_grad]
        self._buckets: list[Tensor] = []
        if self.keeps_gradients:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        elif config.strategy == "ddp":
            self._buckets = [torch.zeros_like(parameter) for parameter in trained]


Note = Callable[[str, Iterable[Tensor] | None], None]
"""Sets the category (one of nbgpu.engine.memory.allocations) of tensors, or with None of all other
tensors."""


class DryRun:
    """The model, optimizer and discriminator of a run, as one rank has them.

    Args:
        config: the result of `without_exchange`, or if `spread` is given the run's settings. Its `batch_size`
            is not used.
        device: the rank's device.
        recipe: the recipe of the settings.
        model, discriminator: used in place of those that would be built here.
        spread: distributes the model over ranks; None for a model that exchanges nothing.
        note: is called with each category of memory and its tensors.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        recipe: Recipe,
        model: nn.Module | None = None,
        discriminator: Discriminator | None = None,
        spread: Callable[[nn.Module], Strategy] | None = None,
        note: Note = lambda category, tensors: None,
    ) -> None:
        self._config = config
        self._device = device
        self._note = note
        self.recipe = recipe
        self.model = model or models.build(config, self.recipe, device)[0]
        self._discriminator = discriminator or Discriminator.of(config, self.recipe, device)
        self.strategy = Unexchanged(config, self.model) if spread is None else spread(self.model)
        # The module whose parameters are this rank's part of the weights.
        module = self.model
        if isinstance(self.strategy, FakeShards):
            module = nn.ParameterList(self.strategy.parameters)
            # Without the recipe's groups of weights, which change no memory, and to which shards do not
            # belong.
            self.optimizer = optimizers.make(config, module.parameters())
        else:
            self.optimizer = GroupedOptimizer(config, recipe, self.model).optimizer
        self._parameters = list(module.parameters())
        self._average = Average(module, config.ema_decay) if config.ema_decay else None
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
        self._note(allocations.PARAMETERS, [own_part(p) for p in [*self._parameters, *self.model.buffers()]])

    def step(self, batch_size: int) -> None:
        """Take one optimizer step, with all memory that a run would hold."""
        config = self._config
        num_waiting = _NUM_PREFETCHED if self._device.type == "cpu" else 0
        batches = [
            precision.as_inputs(config, self.recipe.example(batch_size), self._device)
            for _ in range(config.accumulate + num_waiting)
        ]
        self._note(allocations.BATCHES, [value for batch in batches for value in batch.values()])
        # A run keeps these copies during each step, to restore them if the step is left out.
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        # A third micro-batch would need no more memory than two.
        num_taken = min(2, config.accumulate)
        discriminator = self._discriminator
        loss_of = self.recipe.loss if discriminator is None else discriminator.loss_of_model
        for index, batch in enumerate(batches[:num_taken]):
            with self.strategy.exchange(index == num_taken - 1):
                with precision.autocast(config, self._device):
                    loss = loss_of(self.strategy.replica, batch)["loss"]
                self._scaler.scale(loss / config.accumulate).backward()
            if isinstance(self.strategy, FakeShards):
                self.strategy.backward_is_over()
            if discriminator is not None:
                discriminator.learn(self._scaler)
        gradients = [own_part(p.grad) for p in self._parameters if p.grad is not None]
        self._note(allocations.GRADIENTS, gradients)
        del gradients
        self._scaler.unscale_(self.optimizer)
        clip(self._parameters, config)
        self._scaler.step(self.optimizer)
        if discriminator is not None:
            self._scaler.step(discriminator.optimizer)
        self._scaler.update()
        if self._average is not None:
            self._average.update(0, torch.zeros((), dtype=torch.bool, device=self._device))
            self._note(allocations.AVERAGE, [own_part(tensor) for tensor in self._average.tensors])
        moments = optimizers.state_of(self.optimizer).tensors.values()
        self._note(allocations.OPTIMIZER, [own_part(moment) for moment in moments])
        if discriminator is not None:
            self._note(allocations.DISCRIMINATOR, discriminator.tensors)
        self.zero_grad()
        del buffers

    def between_steps(self) -> None:
        """Label the memory that has no category yet as DDP's buckets. Call between two steps, when all other
        memory is freed or has a category."""
        if self._config.strategy == "ddp":
            self._note(allocations.BUCKETS, None)

    def zero_grad(self) -> None:
        """Reset the gradients, as after a step, even after an interrupted one."""
        self.optimizer.zero_grad(set_to_none=not self.strategy.keeps_gradients)
        if self._discriminator is not None:
            self._discriminator.zero_grad()
