"""A recipe whose layers wait or compute for a given time, with gradients of a given size."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nbgpu.recipes.own import OwnRecipe


class _Waiting(torch.autograd.Function):
    """Sleeps, as a CPU does while its GPU computes: backward for twice as long as forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, wait_s: float) -> Tensor:
        ctx.gradient, ctx.wait_s = gradient, wait_s
        time.sleep(wait_s)
        return x * 1

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(2 * ctx.wait_s)
        return arrived, ctx.gradient, None, None


class _WaitingLayer(nn.Module):
    def __init__(self, width: int, wait_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width * width))
        self.gradient = torch.ones(width * width)
        self.wait_s = wait_s

    def forward(self, x: Tensor) -> Tensor:
        return _Waiting.apply(x, self.weight, self.gradient, self.wait_s)


class Layers(OwnRecipe):
    """Layers of width x width weights each."""

    width: int = 256  # of each layer; its gradient has 4 width^2 bytes
    depth: int = 8  # number of layers
    wait_ms: float = 0.0  # how long each layer waits in the forward pass; 0 for layers that compute
    val_fraction: float = 0.0

    def dataset(self) -> TensorDataset:
        x = torch.rand(self.config.batch_size, self.width)
        return TensorDataset(x)

    def model(self) -> nn.Module:
        if self.wait_ms:
            return nn.Sequential(*[_WaitingLayer(self.width, self.wait_ms / 1000) for _ in range(self.depth)])
        layers = [(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.depth)]
        return nn.Sequential(*[module for layer in layers for module in layer])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        if self.wait_ms:
            x = x[:1].requires_grad_()
        return model(x).mean()
