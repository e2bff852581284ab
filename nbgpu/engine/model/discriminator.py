"""The discriminator of an adversarial recipe, which is trained with the model and replicated on every
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.model import optimizers, precision
from nbgpu.engine.model.optimizers import OptimizerState
from nbgpu.engine.model.strategy import clip
from nbgpu.engine.model.transfers import Transfers
from nbgpu.engine.workload.recipe import Adversarial, Recipe


class Discriminator:
    """A discriminator with its optimizer, the same on every rank.

    It is no DDP object: one all_reduce per step averages its whole gradient, after all micro-batches. A NaN
    on one rank reaches all ranks with it, as with the model's gradient.

    Args:
        config: the settings; optimizer and clipping are those of the model.
        recipe: gives the network, its learning rate and its losses.
        network: the network on the device, with the same weights on every rank.
        device: the rank's device.
    """

    def __init__(
        self, config: TrainConfig, recipe: Adversarial, network: nn.Module, device: torch.device
    ) -> None:
        if any(True for _ in network.buffers()):
            raise ValueError(
                "a discriminator has no buffers: those of BatchNorm would differ between the ranks. Take InstanceNorm"
            )
        self.network = network
        self.optimizer = optimizers.make(config, network.parameters())
        self.follow(config, recipe)
        self._device = device
        self._seen: Any = None

    @classmethod
    def of(cls, config: TrainConfig, recipe: Recipe, device: torch.device) -> Discriminator | None:
        """Build the recipe's discriminator; None if it has none. Every rank draws the same weights."""
        if not isinstance(recipe, Adversarial):
            return None
        torch.manual_seed(config.seed)
        network = recipe.build_discriminator()
        if network is None:
            return None
        return cls(config, recipe, network.to(device, precision.dtype(config)), device)

    def follow(self, config: TrainConfig, recipe: Adversarial) -> None:
        """Continue with other settings."""
        self._config = config
        self.recipe = recipe
        for group in self.optimizer.param_groups:
            group["weight_decay"] = config.weight_decay

    def first_step(self, steps_per_epoch: int) -> int:
        """Return the first step in which the discriminator takes part, counted from 0."""
        return self.recipe.discriminator_first_step(steps_per_epoch)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors that it keeps between steps."""
        moments = optimizers.state_of(self.optimizer).tensors.values()
        parameters = list(self.network.parameters())
        return [*parameters, *(p.grad for p in parameters if p.grad is not None), *moments]

    def loss_of_model(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the terms of the model's loss for a micro-batch. The discriminator's input is kept: the next
        call of `learn` computes the discriminator's loss of it."""
        # The model's loss must add nothing to the gradient of the discriminator's weights. Weights that the
        # recipe has frozen stay frozen afterwards.
        trained = [weight for weight in self.network.parameters() if weight.requires_grad]
        for weight in trained:
            weight.requires_grad_(False)
        try:
            terms, self._seen = self.recipe.loss_against(self.network, model, batch)
        finally:
            for weight in trained:
                weight.requires_grad_(True)
        return terms

    def learn(self, scaler: torch.amp.GradScaler) -> Tensor:
        """Add the gradient for the last micro-batch to that of the step; return the discriminator's loss, a
        scalar."""
        seen, self._seen = self._seen, None
        with precision.autocast(self._config, self._device):
            loss = self.recipe.discriminator_loss(self.network, seen)
        # The gradient of a NaN loss may be finite; this makes it NaN, too.
        start = 1 + 0 * loss.detach()
        scaler.scale(loss / self._config.accumulate).backward(start)
        return loss.detach()

    def exchange(self, scaler: torch.amp.GradScaler, transfers: Transfers | None) -> Tensor:
        """Average the step's gradient over the ranks and clip it; return its norm before clipping.

        A collective. `transfers` notes when the gradient travels.
        """
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        if (world_size := dist.get_world_size()) > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            with nullcontext() if transfers is None else transfers.recording_wait(flat):
                dist.all_reduce(flat)
            flat /= world_size
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        scaler.unscale_(self.optimizer)
        return clip(self.network.parameters(), self._config)

    def set_lr(self, factor: float) -> None:
        """Set the learning rate of a step: its own rate times the factor of schedule and scaling."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.discriminator_lr * factor

    def zero_grad(self) -> None:
        """Reset the gradients, as after a step, even after an interrupted one."""
        self._seen = None
        self.optimizer.zero_grad(set_to_none=True)

    def parts(self) -> dict[str, Tensor]:
        """Return the state that a step changes: tensors by name, 'model.*' and 'optimizer.*'."""
        tensors = {f"model.{name}": tensor for name, tensor in self.network.state_dict().items()}
        moments = optimizers.state_of(self.optimizer).tensors
        return tensors | {f"optimizer.{name}": tensor for name, tensor in moments.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `parts` of this or another rank, or of a checkpoint. The optimizer keeps the
        settings of this run, and `set_lr` sets the rate before each step."""
        named: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            named[part][rest] = tensor
        self.network.load_state_dict(named["model"])
        settings = self.optimizer.state_dict()["param_groups"]
        # The optimizers of the settings keep tensors alone, so there are no other values.
        optimizers.load_state(self.optimizer, OptimizerState(named["optimizer"], {}, settings))
