"""The device's part in leaving out a bad step. That all ranks agree is in tests/faults."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nbgpu.config import train_config
from nbgpu.engine.training.nonfinite import Guard

BAD = float("nan")


class Training:
    """A model with buffers that the forward pass writes to, stepped as the trainer does it."""

    def __init__(self, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.guard = Guard(train_config("autoencoder", **settings), torch.device("cpu"))

    def step(self, factor: float = 1.0) -> None:
        before = [buffer.clone() for buffer in self.model.buffers()]
        loss = self.model(torch.randn(8, 4) * factor).square().mean()
        loss.backward(self.guard.start_of_backward(loss))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.guard.update([self.optimizer], norm, list(self.model.buffers()), before)
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        optimizer = [value for values in self.optimizer.state.values() for value in values.values()]
        return copy.deepcopy([*self.model.state_dict().values(), *optimizer])


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_bad_step_leaves_weights_optimizer_and_buffers_to_the_last_bit() -> None:
    training = Training(on_nonfinite="skip")
    training.step()
    before = training.state()
    training.step(BAD)
    assert same(training.state(), before)
    assert training.guard.num_left_out == 1
    training.step()
    assert not same(training.state(), before)
    assert training.guard.num_left_out == 0


def test_a_run_that_is_to_stop_leaves_out_the_step_that_was_under_way() -> None:
    training = Training()
    training.step()
    before = training.state()
    training.step(BAD)
    training.step()
    assert same(training.state(), before)
    assert training.guard.num_left_out == 2
    assert training.guard.is_over


def test_after_too_many_in_a_row_too() -> None:
    training = Training(on_nonfinite="skip", max_nonfinite_skips=2)
    training.step()
    before = training.state()
    for factor in (BAD, BAD, BAD, 1.0):
        training.step(factor)
    assert same(training.state(), before)
    assert training.guard.num_left_out == 4


def test_the_search_for_a_loss_scale_never_ends_by_itself() -> None:
    training = Training(amp="fp16")
    training.step(BAD)
    before = training.state()
    training.step()
    assert not same(training.state(), before)
    assert not training.guard.is_over


@pytest.mark.parametrize("value", [BAD, float("inf"), -float("inf")])
def test_a_bad_loss_tells_though_its_gradient_is_finite(value: float) -> None:
    weight = torch.ones(3, requires_grad=True)
    guard = Training().guard
    loss = weight.sum() + value
    loss.backward(guard.start_of_backward(loss))
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    weight.grad = None
    loss = weight.sum()
    loss.backward(guard.start_of_backward(loss))
    assert torch.equal(weight.grad, torch.ones(3))
