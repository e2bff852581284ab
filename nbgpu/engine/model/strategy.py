"""How the model is distributed over the ranks: replicated (ddp), sharded (fsdp), or on a single rank.

Every strategy gives the trainer a module to call, and exchanges the gradients of several micro-batches at
once. A checkpoint has whole tensors, and so fits every strategy.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nbgpu.config import TrainConfig
from nbgpu.engine.group import ddp_objects, exchange, group, torch_private
from nbgpu.engine.model import bucket_hooks
from nbgpu.engine.model.bucket_hooks import BucketHook
from nbgpu.engine.model.transfers import Transfers
from nbgpu.errors import ConfigError

_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    # The parameter's name before torch 2.13.
    _SYNC_BUFFERS = "broadcast_buffers"

Result = TypeVar("Result")

_NOTHING = -1
"""The message of a rank that needs no block, in place of a block's number."""

_POSITIONS = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")
"""The part of DDP's error message that lists the positions of the weights without a gradient. With
TORCH_DISTRIBUTED_DEBUG their names, which may begin with digits, stand before it in the same words."""
_MAX_NAMES = 5


class Strategy:
    """The trainer's view of a distributed model. The methods of this base class are those of a rank that has
    the whole model and exchanges nothing."""

    replica: nn.Module
    """The module with which the loss is computed."""
    keeps_gradients = False
    """Whether gradients stay allocated between steps, because they are views of the strategy's own
    buffers."""
    survives = True
    """Whether a replaced rank can get its part of the model from another rank."""
    transfers: Transfers | None = None
    """Records when gradients travel; None if they do not (one rank), or not in DDP's buckets (fsdp)."""
    bucket_order: Sequence[int] = ()
    """The order of the parameters in DDP's buckets, which DDP fixes in its first backward pass; empty before
    that, and without DDP."""

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch: its backward pass exchanges the gradients of the step (`now`),
        or only adds them up on this rank."""
        return nullcontext()

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which `each_alone` can be used. Entering it is a collective."""
        return nullcontext()

    def each_alone(self, work: Callable[[], Result]) -> Result:
        """Call `work` and return its result. `work` may call the model any number of times, independently of
        the other ranks.

        A collective: it returns, or raises the error of `work`, once every rank has done its own work.
        """
        return work()

    def close(self) -> None:
        """Release the objects that belong to the process group."""


def spread(
    config: TrainConfig,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    device: torch.device,
    hook: BucketHook | None = None,
    num_warmup_steps: int = 0,
    bucket_order: Sequence[int] = (),
) -> Strategy:
    """Distribute a model over the ranks as the settings say. A collective.

    Args:
        config: the settings, with the `strategy` and its options.
        model: the model on the device, with the same weights on every rank.
        blocks: the parts of the model that fsdp gathers one at a time.
        device: the rank's device.
        hook: sends DDP's buckets; None for the one that the settings choose.
        num_warmup_steps: the steps of the learning rate's warm-up, in which PowerSGD sends gradients whole.
        bucket_order: the `bucket_order` of the strategy of the run's last step; empty before its first step.
    """
    match config.strategy:
        case "single":
            return Alone(model)
        case "ddp":
            return Replicated(config, model, device, hook, num_warmup_steps, bucket_order)
        case "fsdp":
            return Sharded(config, model, blocks, _mesh_of_all_ranks(device))


def _mesh_of_all_ranks(device: torch.device) -> DeviceMesh:
    """Return the mesh that FSDP shards over; ConfigError if torch would crash with it."""
    if device.type == "cuda" and dist.get_world_size() > 1 and group.membership().backend == "gloo":
        # pytorch/pytorch 152645: gloo uses addresses of GPU memory as if they were the host's.
        raise ConfigError(
            "strategy='fsdp' on several GPU ranks needs NCCL: with gloo, which these ranks use, torch crashes in FSDP's "
            "all_gather. Take strategy='ddp', or give each rank a GPU of its own and leave backend='auto'"
        )
    return init_device_mesh(device.type, (dist.get_world_size(),))


class Alone(Strategy):
    """A single rank without DDP or FSDP, which exchanges nothing."""

    def __init__(self, replica: nn.Module) -> None:
        self.replica = replica


class Replicated(Strategy):
    """DistributedDataParallel: every rank has the whole model, and gradients are averaged while they are
    computed.

    Args:
        config: the settings of DDP.
        model: the model on the device, with the same weights on every rank.
        device: the rank's device.
        hook: sends DDP's buckets; None for the one that the settings choose.
        num_warmup_steps: the steps in which PowerSGD sends gradients whole.
        bucket_order: the order of the parameters in the buckets of an earlier DDP object of this run; empty
            for none.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        device: torch.device,
        hook: BucketHook | None,
        num_warmup_steps: int,
        bucket_order: Sequence[int],
    ) -> None:
        # With a single rank nothing travels, and the time of the same calls counts as the backward pass's.
        self.transfers = Transfers(device) if dist.get_world_size() > 1 else None
        self.keeps_gradients = config.gradient_as_bucket_view
        self.bucket_order = bucket_order
        self._ddp = DistributedDataParallel.__new__(DistributedDataParallel)
        torch_private.initialise_ddp(
            self._ddp,
            model,
            bucket_order,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            # Every rank has drawn the same weights. DDP would send those of rank 0, which may be a replaced
            # rank that is about to load another rank's state.
            init_sync=False,
            **{_SYNC_BUFFERS: config.broadcast_buffers},
        )
        self.replica = self._ddp
        if hook is None:
            hook = bucket_hooks.of(config, num_warmup_steps)
            if self.transfers is not None:
                hook = self.transfers.noting(hook)
        self._ddp.register_comm_hook(None, hook)

    @contextmanager
    def exchange(self, now: bool) -> Iterator[None]:
        """Exchange the gradients of a micro-batch during its backward pass if it is the step's last one
        (`now`), else only add them up on this rank (DDP's `no_sync`)."""
        try:
            with nullcontext() if now else self._ddp.no_sync():
                yield
            if now and not self.bucket_order and not self._ddp.find_unused_parameters:
                # DDP would rebuild its buckets in the next forward pass. Done now, their order can be saved
                # with the state of this step.
                torch_private.rebuild_buckets(self._ddp)
                self.bucket_order = torch_private.bucket_order(self._ddp)
        except RuntimeError as error:
            if not ddp_objects.lacks_gradients(str(error)):
                raise
            raise ConfigError(_advice_on_unused_weights(str(error), self._ddp.module)) from None

    def close(self) -> None:
        ddp_objects.forget(self._ddp)


def _advice_on_unused_weights(message: str, model: nn.Module) -> str:
    """Return the error message about weights without a gradient, with their names and the setting that allows
    them.

    Args:
        message: DDP's, which lists the weights by their positions among those that are trained.
        model: names the weights.
    """
    match = _POSITIONS.search(message)
    trained = [name for name, weights in model.named_parameters() if weights.requires_grad]
    names = [trained[int(position)] for position in match[1].split()] if match else []
    which = ""
    if names:
        num_more = len(names) - _MAX_NAMES
        more = f" and {num_more} more" if num_more > 0 else ""
        which = f": none of {', '.join(names[:_MAX_NAMES])}{more} has a gradient"
    return (
        f"the loss does not use all weights of the model{which}. Train with find_unused_parameters=True, which looks for "
        "such weights in each step, or leave them out of the model"
    )


class Sharded(Strategy):
    """fully_shard (FSDP2, ZeRO stage 3): each rank keeps its shard of weights, gradients and optimizer state.

    Args:
        config: the settings; with `cpu_offload` shards are in host memory.
        model: the model, with the same weights on every rank.
        blocks: the parts that are gathered one at a time.
        mesh: all ranks of the group.
    """

    survives = False

    def __init__(
        self, config: TrainConfig, model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh
    ) -> None:
        offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
        for block in blocks:
            fully_shard(block, mesh=mesh, offload_policy=offload)
        fully_shard(model, mesh=mesh, offload_policy=offload)
        self.replica = model
        assert isinstance(model, FSDPModule)
        self._root: FSDPModule = model
        self._blocks = [
            module for module in model.modules() if isinstance(module, FSDPModule) and module is not model
        ]
        self._has_computed = False
        """Whether there was a forward pass of the whole model: FSDP sets itself up in the first one."""
        self._broken: Exception | None = None
        """The failure of a gathering in an evaluation, after which none can follow."""

    def exchange(self, now: bool) -> AbstractContextManager[None]:
        """Let the next backward pass scatter its gradients (`now`), or keep them whole on this rank."""
        self._has_computed = True
        self._root.set_requires_gradient_sync(now)
        return nullcontext()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Gather the weights outside of all blocks, and register hooks that gather each block right before
        its forward pass (`_gather_next`); reshard all weights at the end."""
        # The weights outside of all blocks stay whole in a forward pass of training, too.
        self._root.unshard()
        hooks = [
            part.register_forward_pre_hook(partial(self._gather_block, number), prepend=True)
            for number, part in enumerate(self._blocks)
        ]
        hooks.append(self.replica.register_forward_pre_hook(self._note_a_pass))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for part in (*self._blocks, self._root):
                part.reshard()
            # FSDP has recorded the order of these forward passes, which differs between the ranks, and would
            # prefetch in this order in the next backward pass. torch before 2.13 cannot reset it.
            if self._has_computed and hasattr(self._root, "reset_iter_state"):
                self._root.reset_iter_state()

    def each_alone(self, work: Callable[[], Result]) -> Result:
        """Call `work`, then take part in gathering blocks until no rank needs one any more."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the others still need this rank's shards, whatever it is
            failure = error
        if self._broken is not None:
            raise self._broken
        # The other ranks may still compute, and need this rank's shards.
        while self._gather_next(_NOTHING) is not None:
            pass
        if failure is not None:
            raise failure
        return cast(Result, result)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_a_pass(self, *_: object) -> None:
        self._has_computed = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather_block(self, number: int, *_: object) -> None:
        """Gather a block before its forward pass, as a hook of it. Blocks that other ranks need are gathered
        first if their numbers are lower."""
        try:
            while self._gather_next(number) != number:
                pass
        except Exception as error:
            self._broken = error
            raise

    def _gather_next(self, needed: int) -> int | None:
        """Agree on the block with the lowest number that any rank needs, and gather it on all ranks; return
        its number, None if no rank needs one. A collective.

        FSDP by itself would gather a block when a forward pass reaches it, and wait for every rank to reach
        it. But ranks have different numbers of held-out samples, and rank 0 alone computes the result.

        Args:
            needed: the number of the block that this rank needs, or `_NOTHING`.
        """
        number = min((n for n in exchange.gather_numbers(needed) if n != _NOTHING), default=None)
        if number is None:
            return None
        block = self._blocks[number]
        # Resharded first, because a rank that still has the block would not take part in gathering it.
        block.reshard()
        block.unshard()
        if number != needed:
            block.reshard()
        return number


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. A collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class WholeTensors:
    """Gathers sharded tensors one after the other, so that a rank has no more than one of them whole.

    Each sharded tensor is a collective: every rank takes all of them, in the same order.

    Args:
        tensors: the same on every rank, sharded or not.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._left = deque(tensors)
        self.failure: Exception | None = None
        """The failure of a collective, after which nothing more can be gathered."""

    def next(self) -> Tensor:
        """Return the next tensor, whole; a tensor that is not sharded is not copied."""
        try:
            return whole(self._left.popleft())
        except Exception as error:
            self.failure = error
            raise

    def take_rest(self) -> None:
        """Take part in the gathering of the tensors that are left, which this rank does not need."""
        while self._left and self.failure is None:
            self.next()


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether some of the tensors are spread over the ranks."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor, which every rank has, sharded as `like` is. No collective.

    The shard has memory of its own, so that the whole tensor's can be freed.
    """
    if not isinstance(like, DTensor):
        return tensor
    on_device = tensor.to(device=like.to_local().device, dtype=like.dtype)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None).clone()


def clip(parameters: Iterable[nn.Parameter], config: TrainConfig) -> Tensor:
    """Clip gradients by value first, then by norm; return the norm before both, a scalar that is the same on
    every rank.

    A collective if the weights are sharded.
    """
    parameters = list(parameters)
    limit = config.clip_norm or math.inf
    if not config.clip_value:
        return whole(nn.utils.clip_grad_norm_(parameters, limit))
    # With an infinite limit torch only computes the norm.
    norm = whole(nn.utils.clip_grad_norm_(parameters, math.inf))
    nn.utils.clip_grad_value_(parameters, config.clip_value)
    nn.utils.clip_grad_norm_(parameters, limit)
    return norm
