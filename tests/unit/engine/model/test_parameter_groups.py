"""The state of an optimizer is by the model's weights: a run can go on with other groups of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nbgpu.config import train_config
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.engine.model.state import State
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.recipe import Survival

CPU = torch.device("cpu")


class OneGroup(Survival):
    """The recipe before it had groups."""

    def parameter_groups(self, model: nn.Module) -> Any:
        return []


def training(recipe_class: type[Survival] = Survival, **settings: Any) -> tuple[State, Survival]:
    small = {"num_patients": 20, "widen_factor": 0.0625, "image_size": (8, 8, 8), "batch_size": 4}
    config = train_config("survival", **{**small, "ema_decay": 0.0, **settings})
    assert isinstance(config, SurvivalConfig)
    recipe = recipe_class(config)
    torch.manual_seed(0)
    model = recipe.build_model()
    return State(config, recipe, model, LearningRate(config, 1, 100, 10), CPU), recipe


def step(state: State, recipe: Survival, seed: int, lr: float = 0.01) -> None:
    torch.manual_seed(seed)
    recipe.loss(state.model, recipe.example(4))["loss"].backward()
    state.grouped.set_lr(lr)
    state.optimizer.step()
    state.optimizer.zero_grad()


def weights(state: State) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_checkpoint_with_one_group_goes_on_with_two(optimizer: str) -> None:
    straight, recipe = training(OneGroup, optimizer=optimizer)
    assert len(straight.optimizer.param_groups) == 1
    step(straight, recipe, 0)
    tensors, about = straight.parts()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed, _ = training(optimizer=optimizer)
    resumed.load(saved, about)
    assert len(resumed.optimizer.param_groups) == 2
    step(straight, recipe, 1)
    step(resumed, recipe, 1)
    for name, value in weights(straight).items():
        assert value.equal(weights(resumed)[name]), name


def test_momentum_and_weight_decay_are_those_of_the_run_that_goes_on() -> None:
    first, recipe = training(optimizer="sgd", momentum=0.5, weight_decay=0.1)
    step(first, recipe, 0)
    tensors, about = first.parts()
    second, _ = training(optimizer="sgd", momentum=0.25, weight_decay=0.2)
    second.load(tensors, about)
    for group in second.optimizer.param_groups:
        assert (group["momentum"], group["weight_decay"]) == (0.25, 0.2)


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    first, recipe = training(optimizer="sgd")
    step(first, recipe, 0)
    second, _ = training(optimizer="adam")
    with pytest.raises(ValueError, match="its optimizer is SGD, and this run's is Adam"):
        second.load(*first.parts())
