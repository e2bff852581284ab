"""Takes two steps of a run on tensors with shapes but without values, to estimate the memory that they need.

torch's FakeTensorMode computes every result's shape and type, and the sizes of all live tensors are added up,
with the scratch memory of convolutions on the CPU. Not included are the scratch memory of other kernels and
of cuDNN, the overhead of allocators, and data in host memory.

oneDNN stores the channels of images and volumes in groups of 16 (of 8 without AVX-512), and copies input,
weights and result to and from that order. A small single sample is unfolded instead: each pixel of the result
gets a copy of the part of the input from which it is computed. So are all samples in 16 bits without AVX-512.
Both were seen with torch 2.13 in the sizes that `aten::convolution` and `aten::convolution_backward` request
from the allocator.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbgpu.config import TrainConfig
from nbgpu.engine.dry_run.fake_shards import FakeShards
from nbgpu.engine.dry_run.steps import DryRun, without_exchange
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory.allocations import GATHERED, AllocationLog
from nbgpu.engine.memory.budget import Need
from nbgpu.engine.model import build as models
from nbgpu.engine.model import precision
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.workload import by_name

_log = logging.getLogger("nbgpu.fake_steps")
_NUM_STEPS = 2
"""The optimizer's state is only there after the first step."""


_LARGEST_UNFOLDED = 20_480
"""A single sample is unfolded up to this product of its first four sizes (torch's `use_mkldnn`)."""
_HAS_AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
_NUM_GROUPED = 16 if _HAS_AVX512 else 8
_NUM_SUMS_OF_SMALL = 4
"""The copies of the weights' gradient that are summed for volumes smaller than the kernel."""

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


class _StorageLog(TorchDispatchMode):
    """Logs the allocation and the free of each storage, once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = AllocationLog()
        self._left_out: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and log each new storage among its results until Python frees it, and the
        kernel's scratch memory."""
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                # The address of torch's storage object in C++: tensors without values have no address of
                # their data.
                key = storage._cdata
                if key not in self._left_out and not self.log.holds(key):
                    self.log.allocate(key, storage.nbytes())
                    # Views of a tensor have the same storage, which is freed with the last one.
                    weakref.finalize(storage, self.log.free, key)
        if scratch := scratch_bytes(function, args, results):
            self.log.allocate_scratch(scratch)
        return results

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors. They must stay alive, because keys are used again."""
        self._left_out |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def note(self, category: str, tensors: Iterable[Tensor] | None) -> None:
        """Set the category of these tensors, or with None of all other live tensors."""
        keys = None if tensors is None else [tensor.untyped_storage()._cdata for tensor in tensors]
        self.log.label(category, keys)


def _empty(model: nn.Module, device: torch.device) -> None:
    """Replace the model's parameters and buffers by tensors without values; tied weights stay tied."""
    empty = {
        parameter: nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
            requires_grad=parameter.requires_grad,
        )
        for parameter in model.parameters()
    }
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            module.register_parameter(name, empty[parameter])
    _empty_buffers(model, device)


def _empty_buffers(model: nn.Module, device: torch.device) -> None:
    """Replace the model's buffers by tensors without values."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def parts(config: TrainConfig, device: torch.device, world_size: int) -> dict[str, int]:
    """Return the memory of one rank at the peak of its steps in bytes, by the categories of
    `nbgpu.engine.memory.allocations`.

    Args:
        config: the result of `without_exchange`.
        device: the rank's; nothing is allocated on it.
        world_size: the number of ranks that the model is spread over, which need not be there.
    """
    # The loss scaler of fp16 checks for overflow, which needs values.
    config = config.changed(amp="bf16") if config.amp == "fp16" else config
    recipe = by_name.load(config)
    model, _ = models.build(config, recipe, torch.device("cpu"))
    discriminator = Discriminator.of(config, recipe, torch.device("cpu"))
    # Called once with real tensors: a recipe may read a file, and keep the shapes of a sample in it.
    recipe.example(1)
    is_shared_out = config.strategy == "fsdp"
    # Tensors of a recipe that are not in its model, such as the filters of a loss, have values.
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        storages = _StorageLog()
        if not is_shared_out:
            stack.enter_context(storages)
        # With fsdp the weights in the model are not counted: FakeShards allocates shards and gathered
        # weights.
        _empty(model, device)
        if is_shared_out:
            storages.leave_out(model.parameters())
            stack.enter_context(storages)
            _empty_buffers(model, device)
        if discriminator is not None:
            _empty(discriminator.network, device)
            discriminator = Discriminator(config, discriminator.recipe, discriminator.network, device)
        spread = None
        if is_shared_out:
            gathered = partial(storages.note, GATHERED)
            spread = partial(FakeShards, blocks=recipe.blocks(model), world_size=world_size, note=gathered)
        dry_run = DryRun(config, device, recipe, model, discriminator, spread, storages.note)
        for _ in range(_NUM_STEPS):
            dry_run.step(config.batch_size)
        dry_run.between_steps()
        return storages.log.bytes_at_peak()


def need_of(config: TrainConfig, world_size: int) -> Need | None:
    """Return the memory of a run's steps for any batch size; None if it cannot be computed without values.

    Steps with one and with two samples are computed: the difference is the need of a sample.

    The tensors are on torch's device 'meta' and not in FakeTensorMode, whose imports would delay the report
    of a failure by seconds. 'meta' has no autocast, so that with `amp` the memory is overestimated.
    """
    config = without_exchange(config)
    try:
        with memory_limit.lifted():
            recipe = by_name.load(config)
            model = models.build(config, recipe, torch.device("cpu"))[0].to("meta")
            discriminator = Discriminator.of(config, recipe, torch.device("meta"))
            one_bytes, two_bytes = (
                _activations(config, model, discriminator, batch_size) for batch_size in (1, 2)
            )
    except Exception as error:  # noqa: BLE001 - a model that reads values cannot run on shapes alone
        _log.info("the memory of a step cannot be computed: %r", error)
        return None
    # Weights, gradients, and the optimizer's two moments.
    state_bytes = 4 * sum(p.nbytes for p in model.parameters())
    if config.strategy == "fsdp" and world_size > 1:
        state_bytes = state_bytes // world_size + _gathered_bytes(recipe.blocks(model), model)
    if discriminator is not None:
        state_bytes += 4 * sum(p.nbytes for p in discriminator.network.parameters())
    return Need(state_bytes + max(0, 2 * one_bytes - two_bytes), max(1, two_bytes - one_bytes))


def _gathered_bytes(blocks: Sequence[nn.Module], model: nn.Module) -> int:
    """Return the most unsharded memory of FSDP in a step, in bytes: in the backward pass the weights of a
    block and of the next one, the block's gradients, and the weights outside of all blocks with their
    gradients."""
    block_bytes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    rest_bytes = sum(parameter.nbytes for parameter in model.parameters()) - sum(block_bytes)
    return 3 * max(block_bytes, default=0) + 2 * rest_bytes


def _activations(
    config: TrainConfig, model: nn.Module, discriminator: Discriminator | None, batch_size: int
) -> int:
    """Return the peak memory of forward and backward in bytes, without the model, which is on the device
    'meta'."""
    recipe = by_name.load(config)
    dtype = precision.dtype(config)
    with _StorageLog() as storages:
        batch = {
            name: torch.empty(
                (batch_size, *value.shape[1:]),
                dtype=dtype if value.is_floating_point() else value.dtype,
                device="meta",
            )
            for name, value in recipe.example(1).items()
        }
        loss_of = recipe.loss if discriminator is None else discriminator.loss_of_model
        loss_of(model, batch)["loss"].backward()
        if discriminator is not None:
            discriminator.zero_grad()
    model.zero_grad(set_to_none=True)
    peak_bytes: int = storages.log.peak_bytes
    return peak_bytes


def scratch_bytes(function: Any, args: tuple[Any, ...], results: Any) -> int:
    """Return the memory that a kernel takes on the CPU in addition to its inputs and results, in bytes; 0 for
    all kernels but convolutions."""
    if function is _FORWARD:
        return _forward_bytes(args[0], args[1], results)
    if function is _BACKWARD:
        return _backward_bytes(args[0], args[1], args[2], args[4], results)
    return 0


def _forward_bytes(image: Tensor, weight: Tensor, result: Tensor) -> int:
    """Return the scratch memory of a convolution's forward kernel on the CPU, in bytes.

    Args:
        image: the input, (N, C, ...).
        weight: (C_out, C, ...).
        result: (N, C_out, ...).
    """
    if image.device.type != "cpu" or _is_pointwise(weight):
        return 0
    if _is_unfolded(image, weight):
        return _unfolded_bytes(weight, result)
    grouped = _grouped(result)
    return max(_copied(image) + weight.nbytes + grouped, grouped + result.nbytes) - result.nbytes


def _backward_bytes(
    gradient: Tensor, image: Tensor, weight: Tensor, strides: Sequence[int], results: Any
) -> int:
    """Return the scratch memory of a convolution's backward kernel on the CPU, in bytes.

    Args:
        gradient: that of the result, (N, C_out, ...).
        image: the input, (N, C, ...).
        weight: (C_out, C, ...).
        strides: the strides of the convolution.
        results: the gradients of input, weight and bias; None for those that are not needed.
    """
    if image.device.type != "cpu":
        return 0
    if not _is_in_onednn(image):
        # The gradient of the bias is added up in float32.
        return max(2 * gradient.nbytes, 0 if _is_pointwise(weight) else _unfolded_bytes(weight, gradient))
    if _is_pointwise(weight):
        return _grouped(gradient)
    if _is_unfolded(image, weight):
        return _unfolded_bytes(weight, gradient)
    # The sizes of the input's and the weights' gradients, and the memory at each stage of the kernel.
    input_bytes, weight_bytes = (0 if result is None else result.nbytes for result in results[:2])
    grouped = _grouped(image) if input_bytes else 0
    held = max(
        _grouped(gradient) + weight.nbytes + grouped if input_bytes else 0,
        # With strides the gradient of the image is copied once more.
        input_bytes + (2 if max(strides) > 1 else 1) * grouped,
        # Without AVX-512 the gradient of the weights is computed from input and gradient as they are.
        input_bytes + _grouped(gradient) + _copied(image) + weight_bytes if _HAS_AVX512 else 0,
        input_bytes + (_NUM_SUMS_OF_SMALL + 1 if _is_small(image, weight) else 2) * weight_bytes,
    )
    return max(0, held - input_bytes - weight_bytes)


def _is_pointwise(weight: Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _is_small(image: Tensor, weight: Tensor) -> bool:
    """Return whether volumes are smaller than the kernel, for which oneDNN has other code."""
    return weight.dim() == 5 and max(image.shape[2:]) < max(weight.shape[2:])


def _is_unfolded(image: Tensor, weight: Tensor) -> bool:
    """Return whether a convolution copies, for each pixel of the result, the part of the input from which the
    pixel is computed. torch's own kernel does so, for single small samples and for dtypes without a kernel of
    oneDNN."""
    if not _is_in_onednn(image):
        return True
    is_small = image.shape[0] == 1 and math.prod(image.shape[:4]) <= _LARGEST_UNFOLDED
    return is_small and image.dtype == torch.float32 and max(weight.shape[2:]) <= 3


def _unfolded_bytes(weight: Tensor, result: Tensor) -> int:
    """Return the bytes of the input copied for each pixel of the result."""
    return len(result) * math.prod(weight.shape[1:]) * math.prod(result.shape[2:]) * result.element_size()


def _is_in_onednn(image: Tensor) -> bool:
    return image.element_size() > 2 or not precision.emulates_16_bits()


def _grouped(image: Tensor) -> int:
    """Return the bytes of an image in oneDNN's order: its channels in groups, with the last group filled
    up."""
    channels = image.shape[1]
    return image.nbytes // channels * (-(-channels // _NUM_GROUPED) * _NUM_GROUPED) if channels else 0


def _copied(image: Tensor) -> int:
    """Return the bytes of the copy of an input; one with few channels is read as it is."""
    return _grouped(image) if image.shape[1] >= _NUM_GROUPED else 0
