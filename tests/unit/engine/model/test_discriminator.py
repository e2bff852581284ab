"""The second network of an adversarial recipe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nbgpu.config import train_config
from nbgpu.engine.model.discriminator import Discriminator


def test_weights_that_a_recipe_has_frozen_stay_frozen() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    network[0].requires_grad_(False)
    required_during_the_models_loss = []

    def loss_against(network: nn.Module, *_: Any) -> tuple[dict[str, torch.Tensor], None]:
        required_during_the_models_loss.extend(w.requires_grad for w in network.parameters())
        return {"loss": torch.zeros(())}, None

    recipe: Any = SimpleNamespace(loss_against=loss_against)
    config = train_config("autoencoder", data="phantoms", steps=1)
    discriminator = Discriminator(config, recipe, network, torch.device("cpu"))
    discriminator.loss_of_model(nn.Identity(), {})
    assert required_during_the_models_loss == [False] * 4
    assert [w.requires_grad for w in network.parameters()] == [False, False, True, True]


def test_a_resumed_discriminator_has_the_optimizer_settings_of_the_new_run() -> None:
    recipe: Any = SimpleNamespace(discriminator_lr=0.1)

    def discriminator(momentum: float) -> Discriminator:
        config = train_config("autoencoder", data="phantoms", steps=1, optimizer="sgd", momentum=momentum)
        return Discriminator(config, recipe, nn.Linear(2, 1), torch.device("cpu"))

    before, after = discriminator(0.9), discriminator(0.5)
    before.network(torch.ones(1, 2)).sum().backward()
    before.optimizer.step()
    after.load(before.parts())
    assert [group["momentum"] for group in after.optimizer.param_groups] == [0.5]
    for was, weight in zip(before.network.parameters(), after.network.parameters(), strict=True):
        assert torch.equal(was, weight)
        moment = before.optimizer.state[was]["momentum_buffer"]
        assert torch.equal(moment, after.optimizer.state[weight]["momentum_buffer"])
