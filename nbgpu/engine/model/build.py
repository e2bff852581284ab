"""Builds the model of a run on its device, with the changes that the settings ask for."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recomputed

from nbgpu.config import TrainConfig
from nbgpu.engine.model import precision
from nbgpu.engine.model.transfers import for_statistics
from nbgpu.engine.workload.recipe import Recipe


def build(config: TrainConfig, recipe: Recipe, device: torch.device) -> tuple[nn.Module, list[str]]:
    """Build the recipe's model, with the changes that the settings ask for. Every rank draws the same
    weights.

    With fsdp the model stays in host memory: `fully_shard` brings it to the device block by block, so that
    the whole model need not fit there.

    Returns:
        (the model, notes for the person).
    """
    notes = []
    torch.manual_seed(config.seed)
    model = recipe.build_model()
    if config.sync_batchnorm:
        model, num_layers = synchronise(model, device)
        notes.append(f"sync_batchnorm: {num_layers} BatchNorm layers were converted")
    place = torch.device("cpu") if config.strategy == "fsdp" else device
    model = model.to(place, precision.dtype(config))
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    if config.checkpoint_activations:
        for block in recipe.blocks(model):
            block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)
    if config.compile:
        # `model.compile()` does nothing for a Sequential (seen with torch 2.13). This way names stay the
        # same, too.
        model.forward = torch.compile(model.forward)
    return model, notes


def synchronise(model: nn.Module, device: torch.device) -> tuple[nn.Module, int]:
    """Return the model with BatchNorm layers that take their statistics over all ranks, and the number of
    these layers."""
    num_layers = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if device.type == "cpu":
        for module in converted.modules():
            if type(module) is nn.SyncBatchNorm:
                # The class is replaced in place, because parameters, buffers and settings stay the same.
                module.__class__ = CpuSyncBatchNorm  # type: ignore[assignment]
    return converted, num_layers


# It does not inherit from SyncBatchNorm, which DDP refuses on the CPU.
class CpuSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """The computation of torch's SyncBatchNorm (Ioffe & Szegedy 2015, over the batches of all ranks), through
    gloo.

    The ranks' batches may differ in size.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...) with the statistics over N and all axes after C of all ranks; in evaluation
        with the running ones. The result has the type of the input."""
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        # In fp16 the sum over a volume overflows, and in bf16 it has three digits. torch's own layer computes
        # in float32 too.
        wide = precision.at_least_float32(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        count = wide.new_tensor([input.numel() / input.shape[1]])
        sums = _sum_over_ranks(torch.cat([wide.sum(axes), count]))
        total = sums[-1]
        mean = sums[:-1] / total
        # The variance in a second pass, because the mean of the squares minus the square of the mean loses
        # most of its digits.
        centred = wide - mean.view(shape)
        variance = _sum_over_ranks(centred.square().sum(axes)) / total
        if self.training and self.running_mean is not None:
            self._update_running_statistics(mean.detach(), variance.detach(), total.detach())
        normalised = centred * (variance.view(shape) + self.eps).rsqrt()
        if self.weight is not None:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        """Update the running statistics as torch does, with the unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * total / (total - 1)).to(self.running_var.dtype), share)


class _SumOverRanks(torch.autograd.Function):
    """An all_reduce with a gradient: the sum on every rank depends on this rank's tensor, so the gradients of
    all ranks are summed, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _all_reduced(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _all_reduced(gradients[0])


def _all_reduced(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks; record how long this rank waits for it."""
    total = tensor.contiguous().clone()
    with for_statistics.noted():
        dist.all_reduce(total)
    return total


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks, with a gradient."""
    return cast(Tensor, _SumOverRanks.apply(tensor))  # type: ignore[no-untyped-call]
