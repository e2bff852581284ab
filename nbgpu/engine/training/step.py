"""The work of one optimizer step: the losses of its micro-batches, their gradients, and the optimizers to
step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbgpu.config import TrainConfig
from nbgpu.engine.model import precision
from nbgpu.engine.model.clipping import clip
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.model.state import State
from nbgpu.engine.model.strategy import Strategy
from nbgpu.engine.training.nonfinite import DISCRIMINATOR_LOSS
from nbgpu.engine.workload.recipe import Batch, Recipe


class PlainStep:
    """A step of the model alone.

    Args:
        config: the settings.
        recipe: computes the loss.
        state: the model, optimizer and loss scaler.
        strategy: how the model is distributed over the ranks.
        device: the rank's.
    """

    def __init__(
        self, config: TrainConfig, recipe: Recipe, state: State, strategy: Strategy, device: torch.device
    ) -> None:
        self._config = config
        self._recipe = recipe
        self._state = state
        self._strategy = strategy
        self._device = device

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the terms of a micro-batch's loss; `loss` is the one that is minimised."""
        with precision.autocast(self._config, self._device):
            return self._loss_terms(batch)

    def backward(self, loss: Tensor, start: Tensor) -> None:
        """Accumulate the gradient of a micro-batch into that of the step; `start` is the gradient of the loss
        to begin from."""
        self._state.scaler.scale(loss / self._config.accumulate).backward(start)

    def auxiliary_step(self) -> Mapping[str, Tensor]:
        """Update auxiliary networks (e.g. a discriminator) on the last micro-batch; return their losses."""
        return {}

    def gradient_norms(self) -> dict[str, Tensor]:
        """Clip the gradients, which are of all micro-batches and ranks; return their norms before clipping. A
        collective.

        `grad_norm`, which is the same on every rank, decides whether the step counts.
        """
        self._state.scaler.unscale_(self._state.optimizer)
        # With cpu_offload the gradients, and so their norm, are in host memory.
        return {"grad_norm": clip(self._state.model.parameters(), self._config).to(self._device)}

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers that step, either all of them or none."""
        return [self._state.optimizer]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of this step."""
        self._state.grouped.set_lr(lr)

    def zero_grad(self) -> None:
        """Clear the gradients for the next step."""
        self._state.optimizer.zero_grad(set_to_none=not self._strategy.keeps_gradients)

    def _loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        return self._recipe.loss(self._strategy.replica, batch)


class AdversarialStep(PlainStep):
    """A step of the model and of its discriminator. Either both learn from it, or neither does.

    Args:
        discriminator: learns from the model's newest output.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        state: State,
        strategy: Strategy,
        device: torch.device,
        discriminator: Discriminator,
    ) -> None:
        super().__init__(config, recipe, state, strategy, device)
        self._discriminator = discriminator

    def auxiliary_step(self) -> Mapping[str, Tensor]:
        return {DISCRIMINATOR_LOSS: self._discriminator.learn(self._state.scaler)}

    def gradient_norms(self) -> dict[str, Tensor]:
        norms = super().gradient_norms()
        norms["discriminator_grad_norm"] = self._discriminator.exchange(
            self._state.scaler, self._strategy.transfers
        )
        norms["grad_norm"] = norms["grad_norm"] + 0 * norms["discriminator_grad_norm"]
        return norms

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return [*super().optimizers, self._discriminator.optimizer]

    def set_lr(self, lr: float) -> None:
        super().set_lr(lr)
        self._discriminator.set_lr(lr / self._config.lr)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._discriminator.zero_grad()

    def _loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        return self._discriminator.loss_of_model(self._strategy.replica, batch)
