"""The average of the weights: what torch computes, and untouched where it must be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nbgpu.engine.model.averaging import Average

TAKEN = torch.tensor(False)
LEFT_OUT = torch.tensor(True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 3)).double()
    # Tied: two names for the same numbers.
    model[3].weight = model[2].weight
    return model


def train_a_step(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight)
        for buffer in model.buffers():
            buffer += 1


def test_it_is_what_torch_averages_with_a_decay_that_rises() -> None:
    model = network()
    average = Average(model, decay=0.5)
    expected = [weight.detach().clone() for weight in model.parameters()]
    for step in range(20):
        train_a_step(model)
        average.update(step, TAKEN)
        decay = min(0.5, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(expected, list(model.parameters()), 0)
    state = average.state_dict()
    for (name, _), tensor in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-14)
    assert not torch.equal(state["0.weight"], model[0].weight)
    assert torch.equal(state["3.weight"], state["2.weight"])
    assert torch.equal(state["1.running_mean"], torch.full((4,), 20.0, dtype=torch.float64))
    model.load_state_dict(state)


def test_a_step_that_is_left_out_leaves_it_as_it_is() -> None:
    model = network()
    average = Average(model, decay=0.9)
    train_a_step(model)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    average.update(3, LEFT_OUT)
    assert all(torch.equal(average.state_dict()[name], before[name]) for name, _ in model.named_parameters())
    average.update(3, TAKEN)
    assert not torch.equal(average.state_dict()["0.weight"], before["0.weight"])


def test_the_model_gets_its_own_weights_back_also_after_a_failure() -> None:
    model = network()
    average = Average(model, decay=0.9)
    train_a_step(model)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    averaged = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    with average.in_the_model():
        assert all(torch.equal(tensor, averaged[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ZeroDivisionError), average.in_the_model():
        1 / 0  # noqa: B018
    average.out_of_the_model()
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in average.state_dict().items())


def test_it_goes_on_from_its_state() -> None:
    model, other = network(), network()
    average, copy = Average(model, decay=0.9), Average(other, decay=0.9)
    train_a_step(model)
    average.update(0, TAKEN)
    copy.load_state_dict(average.state_dict())
    assert all(
        torch.equal(copy.state_dict()[name], average.state_dict()[name])
        for name, _ in other.named_parameters()
    )
