"""The state of training: model, optimizer, average, discriminator, loss scaler and learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.model.averaging import Average
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.model.parameter_groups import GroupedOptimizer
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.engine.model.strategy import shared_out
from nbgpu.engine.workload.recipe import Recipe


class State:
    """The parts that an optimizer step changes.

    Args:
        config: the settings.
        recipe: names groups of weights, and may make the optimizer.
        model: the model on the device, sharded if the strategy shards it.
        learning_rate: the learning rate of each step.
        device: the rank's device.
        discriminator: the discriminator of an adversarial recipe.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        model: nn.Module,
        learning_rate: LearningRate,
        device: torch.device,
        discriminator: Discriminator | None = None,
    ) -> None:
        self.model = model
        self.discriminator = discriminator
        self.grouped = GroupedOptimizer(config, recipe, model)
        self.optimizer = self.grouped.optimizer
        self.learning_rate = learning_rate
        self._device = device
        self.scaler = self._new_scaler(config)
        self.average = Average(model, config.ema_decay) if config.ema_decay else None

    def _new_scaler(self, config: TrainConfig) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device.type, enabled=config.amp == "fp16")

    def follow(self, config: TrainConfig, recipe: Recipe, learning_rate: LearningRate) -> None:
        """Continue with other settings and another learning rate."""
        self.grouped.follow(config, recipe, self.model)
        learning_rate.load_state(self.learning_rate.state())
        self.learning_rate = learning_rate
        if self.scaler.is_enabled() != (config.amp == "fp16"):
            self.scaler = self._new_scaler(config)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state that a step changes.

        Returns:
            (tensors by name, with fsdp sharded; the rest as JSON). Names begin with 'model.', 'optimizer.'
            and, where there are some, 'average.' and 'discriminator.'.
        """
        moments, about_optimizer = self.grouped.state()
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.state_dict().items()}
        about = {
            **about_optimizer,
            "schedule": self.learning_rate.state(),
            "scaler": self.scaler.state_dict(),
        }
        if self.discriminator is not None:
            part = self.discriminator.parts()
            tensors |= {f"discriminator.{name}": tensor for name, tensor in part.items()}
        return tensors, about

    def load(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Load the result of `parts` of this or another rank, with whole tensors; every rank loads the same.

        Each tensor is looked up once, and sharded before the next one, so that tensors which come from a file
        need not be in memory together. Learning rate and weight decay come from this run's settings, not from
        the state. If the state has no average, the average begins with the weights; if it has no
        discriminator, this run's keeps its initial weights.
        """
        present = self.model.state_dict()
        weights = _Part("model", tensors)
        self.model.load_state_dict(
            {name: shared_out(t, present[name]) if name in present else t for name, t in weights.items()}
        )
        # Freed first, because the optimizer's present moments would take memory in addition to the new ones.
        self.optimizer.state.clear()
        parameters = self.grouped.parameters
        moments = {
            name: tensor if tensor.dim() == 0 else shared_out(tensor, parameters[int(name.split(".")[0])])
            for name, tensor in _Part("optimizer", tensors).items()
        }
        self.grouped.load_state(moments, about)
        if self.average is not None:
            self.average.load_state_dict(_Part("average", tensors) or weights)
        if self.discriminator is not None and (part := _Part("discriminator", tensors)):
            self.discriminator.load(part)
        self.learning_rate.load_state(about["schedule"])
        # A scaler's state is empty if it was not enabled: then this run's keeps its initial state.
        self.scaler.load_state_dict(about["scaler"] or self.scaler.state_dict())


class _Part(Mapping[str, Tensor]):
    """The tensors of one part of the state, by their names within it.

    Args:
        part: the part's name, such as 'model'.
        tensors: those of the whole state.
    """

    def __init__(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self._part = part
        self._tensors = tensors
        self._names = [name.partition(".")[2] for name in tensors if name.startswith(f"{part}.")]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[f"{self._part}.{name}"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
