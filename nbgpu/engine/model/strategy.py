"""How the model is spread over the ranks: whole on each of them (ddp), shared out (fsdp), or on one rank alone.

The trainer sees a model to call, a way to hold back the exchange between micro-batches, and tensors that can be
made whole for a checkpoint, whatever the strategy: a checkpoint of one fits all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nbgpu.config import TrainConfig
from nbgpu.engine.group import ddp_objects

_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    # Its name before torch 2.13.
    _SYNC_BUFFERS = "broadcast_buffers"


class Strategy(Protocol):
    """What the trainer needs to know of how the model is spread."""

    replica: nn.Module
    """What the loss is computed with."""
    keeps_gradients: bool
    """Gradients stay where they are between two steps, because they stand in buffers of the strategy's own."""
    survives: bool
    """A rank that is replaced can have its part of the model from another one."""

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: whether its backward pass exchanges gradients, or adds them up on each rank."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """In it each rank can use the whole model with no other. Entering and leaving it are collectives."""
        ...

    def close(self) -> None:
        """Lets go of what belongs to the process group."""
        ...


def spread(
    config: TrainConfig, model: nn.Module, blocks: Iterable[nn.Module], device: torch.device
) -> Strategy:
    """Spreads a model over the ranks, as the settings say. A collective.

    Args:
        config: its `strategy`, and that strategy's own options.
        model: on the device; every rank has the same weights.
        blocks: parts of the model that fsdp gathers one at a time.
        device: the rank's.
    """
    match config.strategy:
        case "single":
            return Alone(model)
        case "dp":
            return Alone(DataParallel(model))
        case "ddp":
            return Replicated(config, model, device)
        case "fsdp":
            return Sharded(config, model, blocks, device)


class Alone:
    """One rank, which exchanges nothing."""

    keeps_gradients = False
    survives = True

    def __init__(self, replica: nn.Module) -> None:
        self.replica = replica

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class Replicated:
    """DistributedDataParallel: every rank has the whole model, and gradients are averaged while they are computed."""

    survives = True

    def __init__(self, config: TrainConfig, model: nn.Module, device: torch.device) -> None:
        self.keeps_gradients = config.gradient_as_bucket_view
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            # Every rank has drawn the same weights. What DDP would send are those of rank 0, which may be new here, and
            # about to take the state of another.
            init_sync=False,
            **{_SYNC_BUFFERS: config.broadcast_buffers},  # type: ignore[arg-type]
        )
        self.replica: nn.Module = self._ddp
        match config.comm_hook:
            case "none":
                pass
            case "bf16":
                self._ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
            case "fp16":
                self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            case "powersgd":
                state = powerSGD_hook.PowerSGDState(
                    process_group=None,
                    matrix_approximation_rank=config.powersgd_rank,
                    # Before it the gradients are sent whole, and DDP settles its buckets meanwhile.
                    start_powerSGD_iter=max(10, config.num_warmup_steps(config.steps)),
                    random_seed=config.seed,
                )
                self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        return nullcontext() if now else self._ddp.no_sync()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        ddp_objects.forget(self._ddp)


class Sharded:
    """fully_shard (FSDP2, the third stage of ZeRO): each rank keeps its part of weights, gradients and optimizer state."""

    keeps_gradients = False
    survives = False

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
                # As fully_shard has it: what the root needs in the backward pass is needed at once.
                part.set_reshard_after_forward(part is not self.replica, recurse=False)
                part.reshard()

    def close(self) -> None:
        pass


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each whole on every rank. A collective where some are shared out."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be shared out over the ranks. A collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What of a tensor this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every rank has, shared out as `like` is. No collective."""
    if not isinstance(like, DTensor):
        return tensor
    on_device = tensor.to(device=like.to_local().device, dtype=like.dtype)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
