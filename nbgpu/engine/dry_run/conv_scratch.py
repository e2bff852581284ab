"""The scratch memory of convolutions on the CPU, as far as it follows from their shapes.

oneDNN keeps the channels of images and volumes in groups of 16 (of 8 without AVX-512), and copies input,
weights and result to and from that order. Small single samples are unfolded instead: each pixel of the result
gets a copy of the part of the input that it is computed from. Both were seen with torch 2.13 in the pieces
that `aten::convolution` and `aten::convolution_backward` take from the allocator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LARGEST_UNFOLDED = 20_480
"""A single sample is unfolded up to this product of its first four sizes (torch's `use_mkldnn`)."""
_NUM_GROUPED = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
_NUM_SUMS_OF_SMALL = 4
"""The copies of the weights' gradient that are summed for volumes smaller than the kernel."""

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def scratch_bytes(function: Any, args: tuple[Any, ...], results: Any) -> int:
    """Return what the kernel takes on the CPU beside its inputs and results, in bytes; 0 for all kernels but
    convolutions."""
    if function is _FORWARD:
        return _forward_bytes(args[0], args[1], results)
    if function is _BACKWARD:
        return _backward_bytes(args[0], args[1], args[2], args[4], results)
    return 0


def _forward_bytes(image: Tensor, weight: Tensor, result: Tensor) -> int:
    if image.device.type != "cpu" or _is_pointwise(weight):
        return 0
    if _is_unfolded(image, weight):
        return _unfolded_bytes(weight, result)
    grouped = _grouped(result)
    return max(_copied(image) + weight.nbytes + grouped, grouped + result.nbytes) - result.nbytes


def _backward_bytes(
    gradient: Tensor, image: Tensor, weight: Tensor, strides: Sequence[int], results: Any
) -> int:
    if image.device.type != "cpu":
        return 0
    if _is_pointwise(weight):
        return _grouped(gradient)
    if _is_unfolded(image, weight):
        return _unfolded_bytes(weight, gradient)
    of_image, of_weight = (0 if result is None else result.nbytes for result in results[:2])
    grouped = _grouped(image) if of_image else 0
    held = max(
        _grouped(gradient) + weight.nbytes + grouped if of_image else 0,
        # With strides the gradient of the image is copied once more.
        of_image + (2 if max(strides) > 1 else 1) * grouped,
        of_image + _grouped(gradient) + _copied(image) + of_weight,
        of_image + (_NUM_SUMS_OF_SMALL + 1 if _is_small(image, weight) else 2) * of_weight,
    )
    return max(0, held - of_image - of_weight)


def _is_pointwise(weight: Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _is_small(image: Tensor, weight: Tensor) -> bool:
    """Return whether volumes are smaller than the kernel, for which oneDNN has other code."""
    return weight.dim() == 5 and max(image.shape[2:]) < max(weight.shape[2:])


def _is_unfolded(image: Tensor, weight: Tensor) -> bool:
    is_small = image.shape[0] == 1 and math.prod(image.shape[:4]) <= _LARGEST_UNFOLDED
    return is_small and image.dtype == torch.float32 and max(weight.shape[2:]) <= 3


def _unfolded_bytes(weight: Tensor, result: Tensor) -> int:
    return math.prod(weight.shape[1:]) * math.prod(result.shape[2:]) * result.element_size()


def _grouped(image: Tensor) -> int:
    """Return the bytes of an image with its channels in groups, the last of which is filled up."""
    channels = image.shape[1]
    return image.nbytes // channels * (-(-channels // _NUM_GROUPED) * _NUM_GROUPED) if channels else 0


def _copied(image: Tensor) -> int:
    """Return the bytes of the copy of an input; one with few channels is read as it is."""
    return _grouped(image) if image.shape[1] >= _NUM_GROUPED else 0
