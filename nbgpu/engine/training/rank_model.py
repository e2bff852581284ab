"""The model of a run on this rank: building and distributing it, the work of an optimizer step, and undoing a
step that was cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbgpu.config import TrainConfig
from nbgpu.engine.group import activity
from nbgpu.engine.memory import budget, usage
from nbgpu.engine.model import build as models
from nbgpu.engine.model import precision
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.engine.model.state import State
from nbgpu.engine.model.strategy import Strategy, clip, spread
from nbgpu.engine.training.nonfinite import DISCRIMINATOR_LOSS, Guard
from nbgpu.engine.workload.recipe import Adversarial, Batch, Recipe


@dataclass
class PlainStep:
    """A step of the model alone."""

    config: TrainConfig
    recipe: Recipe
    """Computes the loss."""
    state: State
    """The model, optimizer and loss scaler."""
    strategy: Strategy
    """How the model is distributed over the ranks."""
    device: torch.device
    """The rank's."""

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the terms of a micro-batch's loss; `loss` is the one that is minimised."""
        with precision.autocast(self.config, self.device):
            return self._loss_terms(batch)

    def backward(self, loss: Tensor, start: Tensor) -> None:
        """Accumulate the gradient of a micro-batch into that of the step; `start` is the gradient of the loss
        to begin from."""
        self.state.scaler.scale(loss / self.config.accumulate).backward(start)

    def auxiliary_step(self) -> Mapping[str, Tensor]:
        """Update auxiliary networks (e.g. a discriminator) on the last micro-batch; return their losses."""
        return {}

    def gradient_norms(self) -> dict[str, Tensor]:
        """Clip the gradients, which are of all micro-batches and ranks; return their norms before clipping. A
        collective.

        `grad_norm`, which is the same on every rank, decides whether the step counts.
        """
        self.state.scaler.unscale_(self.state.optimizer)
        # With cpu_offload the gradients, and so their norm, are in host memory.
        return {"grad_norm": clip(self.state.model.parameters(), self.config).to(self.device)}

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers that step, either all of them or none."""
        return [self.state.optimizer]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of this step."""
        self.state.grouped.set_lr(lr)

    def zero_grad(self) -> None:
        """Clear the gradients for the next step."""
        self.state.optimizer.zero_grad(set_to_none=not self.strategy.keeps_gradients)

    def _loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        return self.recipe.loss(self.strategy.replica, batch)


@dataclass
class AdversarialStep(PlainStep):
    """A step of the model and of its discriminator. Either both learn from it, or neither does."""

    discriminator: Discriminator
    """Learns from the model's newest output."""

    def auxiliary_step(self) -> Mapping[str, Tensor]:
        """Add the discriminator's gradient on the last micro-batch; return its loss."""
        return {DISCRIMINATOR_LOSS: self.discriminator.learn(self.state.scaler)}

    def gradient_norms(self) -> dict[str, Tensor]:
        """Clip the gradients of the model and of the discriminator; return their norms before clipping. A
        collective."""
        norms = super().gradient_norms()
        norms["discriminator_grad_norm"] = self.discriminator.exchange(
            self.state.scaler, self.strategy.transfers
        )
        # 0 times NaN is NaN: a bad gradient of the discriminator makes the norm of the step bad, so that both
        # networks leave the step out.
        norms["grad_norm"] = norms["grad_norm"] + 0 * norms["discriminator_grad_norm"]
        return norms

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return [*super().optimizers, self.discriminator.optimizer]

    def set_lr(self, lr: float) -> None:
        super().set_lr(lr)
        # The discriminator has a learning rate of its own, and takes the factor of schedule and warm-up from
        # the model's.
        self.discriminator.set_lr(lr / self.config.lr)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.discriminator.zero_grad()

    def _loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        return self.discriminator.loss_of_model(self.strategy.replica, batch)


class RankModel:
    """The model on this rank. It is built once, and distributed over the ranks by DDP or FSDP again whenever
    their group is formed.

    Args:
        guard: leaves out the updates of bad steps.
        device: the rank's.
    """

    def __init__(self, guard: Guard, device: torch.device) -> None:
        self._guard = guard
        self._device = device
        self._model: nn.Module | None = None
        self._discriminator: Discriminator | None = None
        self._state: State | None = None
        """The state of the two networks; None until `prepare`."""
        self._strategy: Strategy | None = None
        self._buffers_before_step: list[Tensor] = []
        """Copies with which a step can be undone; empty between steps."""
        self.bucket_order: Sequence[int] = ()
        """The order of the parameters in DDP's buckets after the last step. The DDP object of the next group,
        also in a process that replaces this one, takes the same order."""
        self.num_parameters = 0
        """How many numbers the parameters of the whole model hold; 0 before it is built."""
        self._before_bytes: int | None = None
        """The memory that the process held besides the run's state, measured before the first step; None
        until then."""

    @property
    def is_built(self) -> bool:
        """Return whether there is a model that steps can continue with."""
        return self._state is not None

    @property
    def state(self) -> State:
        """Return everything that a step changes."""
        assert self._state is not None, "the model is built before the first step"
        return self._state

    @property
    def strategy(self) -> Strategy:
        """Return the strategy that distributes the model over the ranks of the present group."""
        assert self._strategy is not None, "the ranks are gathered before the first step"
        return self._strategy

    @property
    def survives(self) -> bool:
        """Return whether a rank that is replaced can get its part of the model from another rank."""
        return self._strategy is None or self._strategy.survives

    def build(self, config: TrainConfig, recipe: Recipe) -> Sequence[str]:
        """Build the model and its discriminator, unless there is a state; return notes about the model. Every
        rank draws the same weights."""
        if self._state is not None:
            return ()
        # Freed first: they are left over if `prepare` was interrupted.
        self._model = self._discriminator = None
        with activity.during("building the model"):
            self._model, notes = models.build(config, recipe, self._device)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._discriminator = Discriminator.of(config, recipe, self._device)
        return notes

    def spread(
        self, config: TrainConfig, recipe: Recipe, learning_rate: LearningRate, bucket_order: Sequence[int]
    ) -> None:
        """Distribute the model over the ranks of the group by DDP or FSDP. A collective.

        Args:
            config: the settings.
            recipe: names the blocks that FSDP gathers one at a time.
            learning_rate: its warm-up decides when PowerSGD begins.
            bucket_order: the order of the parameters in DDP's buckets in the state that the run begins with.
        """
        assert self._model is not None, "the model is built before it is distributed"
        self.bucket_order = bucket_order
        self._strategy = spread(
            config,
            self._model,
            recipe.blocks(self._model),
            self._device,
            num_warmup_steps=learning_rate.num_warmup_steps,
            bucket_order=bucket_order,
        )

    def prepare(self, config: TrainConfig, recipe: Recipe, learning_rate: LearningRate) -> None:
        """Make the optimizer and the rest of the state, unless there is a state. Call it after `spread`,
        because FSDP replaces the parameters. No collective, so that it can run in `together`: a recipe's own
        optimizer may fail on one rank alone."""
        if self._state is None:
            assert self._model is not None, "the model is built and distributed first"
            self._state = State(config, recipe, self._model, learning_rate, self._device, self._discriminator)

    def follow(self, config: TrainConfig, recipe: Recipe) -> None:
        """Continue under other settings."""
        self._guard.follow(config)
        if self._state is not None and self._state.discriminator is not None:
            assert isinstance(recipe, Adversarial)
            self._state.discriminator.follow(config, recipe)

    # ---- a step ----

    def begin_step(self, config: TrainConfig, recipe: Recipe, step: int, steps_per_epoch: int) -> PlainStep:
        """Begin the next step; return it as a PlainStep, or as an AdversarialStep from the discriminator's
        first step on.

        Args:
            config, recipe: the present settings, and the recipe built from them.
            step: the number of steps done.
            steps_per_epoch: the optimizer steps of one pass over the data.
        """
        # The forward pass changes the running statistics of BatchNorm; the copies are put back if the step is
        # left out or cut off.
        self._buffers_before_step = [buffer.clone() for buffer in self.state.model.buffers()]
        parts = (config, recipe, self.state, self.strategy, self._device)
        discriminator = self.state.discriminator
        if discriminator is None or step < discriminator.first_step(steps_per_epoch):
            return PlainStep(*parts)
        return AdversarialStep(*parts, discriminator)

    def end_step(self, computed: PlainStep, step: int, lr: float, grad_norm: Tensor) -> Mapping[str, Tensor]:
        """Apply the gradients to the weights, and update the average and the scaler, unless the gradients are
        not finite.

        The caller holds interrupts back: one in the middle would leave a state between two steps.

        Args:
            computed: the step, with its gradients.
            step: the number of the step.
            lr: the learning rate.
            grad_norm: the norm of the gradients of all ranks.

        Returns:
            The information about the inputs that `Guard.judge` needs.
        """
        computed.set_lr(lr)
        buffers = list(self.state.model.buffers())
        inputs = self._guard.update(computed.optimizers, grad_norm, buffers, self._buffers_before_step)
        if self.state.average is not None:
            self.state.average.update(step, self._guard.has_left_out)
        self.state.scaler.update()
        computed.zero_grad()
        self._buffers_before_step = []
        self.bucket_order = self.strategy.bucket_order
        return inputs

    def undo_step(self) -> None:
        """Revert the changes of a step that was cut off."""
        if self._state is None:
            return
        # A validation that was cut off may have left the averaged weights in the model.
        if self._state.average is not None:
            self._state.average.out_of_the_model()
        # The gradients are views into DDP's buckets, which may hold half of a sum.
        self._state.model.zero_grad(set_to_none=True)
        if self._state.discriminator is not None:
            self._state.discriminator.zero_grad()
        # Between two steps there are no copies, and nothing to put back.
        for buffer, before in zip(self._state.model.buffers(), self._buffers_before_step, strict=False):
            buffer.copy_(before)
        # If another rank's state is loaded next, a second `undo_step` must not put these copies over it.
        self._buffers_before_step = []

    # ---- the end of a group or of the state ----

    def leave_group(self) -> None:
        """Release DDP's or FSDP's objects, which belong to a process group that is about to end."""
        if self._strategy is not None:
            self._strategy.close()
            self._strategy = None

    def forget(self) -> None:
        """Release the networks and their state; `build` makes new ones."""
        self._model = self._discriminator = self._state = None
        self._buffers_before_step = []
        self._guard.restore(0)

    # ---- memory ----

    def measure_memory_before_steps(self) -> None:
        """Measure the memory that the process holds in addition to the run's state, before the first step."""
        usage.begin_peak(self._device)
        used_bytes = usage.Usage.of(self._device).used_bytes
        self._before_bytes = max(0, used_bytes - self._static(before_bytes=0).total_bytes)

    def static_memory(self) -> budget.Static | None:
        """Return the memory that the run holds from step to step; None before its first step."""
        if self._state is None or self._before_bytes is None:
            return None
        return self._static(self._before_bytes)

    def _static(self, before_bytes: int) -> budget.Static:
        """Return the memory of the state and of what the process held before it."""
        state = self.state
        average = () if state.average is None else state.average.tensors
        discriminator = () if state.discriminator is None else state.discriminator.tensors
        return budget.Static.of(state.model, state.optimizer, before_bytes, average, discriminator)
