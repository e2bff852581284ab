"""How the model is distributed over the ranks: replicated (ddp), sharded (fsdp), or on a single rank.

With every strategy the trainer has a model to call, a way to postpone the exchange between micro-batches, and
tensors that can be gathered for a checkpoint. A checkpoint of one strategy fits all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nbgpu.config import TrainConfig
from nbgpu.engine.group import ddp_objects
from nbgpu.engine.model import bucket_hooks
from nbgpu.engine.model.bucket_hooks import BucketHook
from nbgpu.engine.model.transfers import Transfers

_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    # The parameter's name before torch 2.13.
    _SYNC_BUFFERS = "broadcast_buffers"


class Strategy(Protocol):
    """The trainer's view of a distributed model."""

    replica: nn.Module
    """The module with which the loss is computed."""
    keeps_gradients: bool
    """Whether gradients stay allocated between steps, because they are views of the strategy's own
    buffers."""
    survives: bool
    """Whether a replaced rank can get its part of the model from another rank."""
    transfers: Transfers | None
    """Notes when gradients travel; None where they do not, or not beside the computation of others."""

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch, whose backward pass exchanges gradients now or only adds them
        up locally."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which each rank can use the whole model alone.

        Entering and leaving it are collectives.
        """
        ...

    def close(self) -> None:
        """Release the objects that belong to the process group."""
        ...


def spread(
    config: TrainConfig,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    device: torch.device,
    hook: BucketHook | None = None,
    num_warmup_steps: int = 0,
) -> Strategy:
    """Distribute a model over the ranks as the settings say. A collective.

    Args:
        config: the settings, with the `strategy` and its options.
        model: the model on the device, with the same weights on every rank.
        blocks: the parts of the model that fsdp gathers one at a time.
        device: the rank's device.
        hook: sends DDP's buckets; None for the one that the settings choose.
        num_warmup_steps: the steps of the learning rate's warm-up, in which PowerSGD sends gradients whole.
    """
    match config.strategy:
        case "single":
            return Alone(model)
        case "ddp":
            return Replicated(config, model, device, hook, num_warmup_steps)
        case "fsdp":
            return Sharded(config, model, blocks, device)


class Alone:
    """A single rank, which exchanges nothing."""

    keeps_gradients = False
    survives = True
    transfers: Transfers | None = None

    def __init__(self, replica: nn.Module) -> None:
        self.replica = replica

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class Replicated:
    """DistributedDataParallel: every rank has the whole model, and gradients are averaged while they are
    computed."""

    survives = True

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        device: torch.device,
        hook: BucketHook | None,
        num_warmup_steps: int,
    ) -> None:
        self.transfers: Transfers | None = Transfers(device)
        self.keeps_gradients = config.gradient_as_bucket_view
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            # Every rank has drawn the same weights. DDP would send those of rank 0, which may be a replaced
            # rank that is about to load another rank's state.
            init_sync=False,
            **{_SYNC_BUFFERS: config.broadcast_buffers},  # type: ignore[arg-type]
        )
        self.replica: nn.Module = self._ddp
        chosen = hook or self.transfers.noting(bucket_hooks.of(config, num_warmup_steps))
        self._ddp.register_comm_hook(None, chosen)

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        return nullcontext() if now else self._ddp.no_sync()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        ddp_objects.forget(self._ddp)


class Sharded:
    """fully_shard (FSDP2, ZeRO stage 3): each rank keeps its shard of weights, gradients and optimizer
    state."""

    keeps_gradients = False
    survives = False
    transfers: Transfers | None = None

    def __init__(
        self, config: TrainConfig, model: nn.Module, blocks: Iterable[nn.Module], device: torch.device
    ) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
        for block in blocks:
            fully_shard(block, mesh=mesh, offload_policy=offload)
        fully_shard(model, mesh=mesh, offload_policy=offload)
        self.replica = model
        self._parts = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        root = self.replica
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(now)
        return nullcontext()

    @contextmanager
    def whole(self) -> Iterator[None]:
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts:
                # The default of fully_shard: the root's weights stay, because the backward pass needs them at
                # once.
                part.set_reshard_after_forward(part is not self.replica, recurse=False)
                part.reshard()

    def close(self) -> None:
        pass


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, each whole on every rank. A collective if some are sharded."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. A collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor, which every rank has, sharded as `like` is. No collective."""
    if not isinstance(like, DTensor):
        return tensor
    on_device = tensor.to(device=like.to_local().device, dtype=like.dtype)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
