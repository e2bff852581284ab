"""Serialization of tensors in a parcel. Memory that several tensors share is sent once.

This module needs torch. The notebook's kernel imports it only when a tensor is transferred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

_LARGEST_ITEM_BYTES = 16
"""The size of an element of torch's largest dtype, complex128."""

Source = memoryview | Callable[[memoryview], None]
"""The bytes of a block, or a function that writes them into a buffer."""


@dataclass(frozen=True)
class TensorForm:
    """Everything about a tensor except its bytes."""

    block: int
    """The index of the block with its bytes, which it may share with other tensors; -1 for no elements."""
    dtype: str
    """The name of the dtype in torch, such as 'float32'."""
    offset: int
    """The offset of the first element in the block, in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool


def is_plain(value: Any) -> bool:
    """Return whether a value is a plain tensor. Other kinds, such as sparse tensors, are pickled by torch,
    which reduces them to plain ones."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_quantized
    )


def take_apart(
    tensors: Sequence[torch.Tensor], first_block: int
) -> tuple[list[TensorForm], list[tuple[int, Source]]]:
    """Split tensors into their forms and blocks of bytes. Tensors that share memory share a block. Only the
    part of a storage that the tensors view is sent.

    Args:
        tensors: the tensors.
        first_block: the index of the first block.

    Returns:
        The forms, and (size in bytes, source) of each block.
    """
    forms: list[TensorForm | None] = [None] * len(tensors)
    blocks: list[tuple[int, Source]] = []
    by_storage: dict[tuple[torch.device, int], list[int]] = defaultdict(list)
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    for index, tensor in enumerate(plain):
        if tensor.numel():
            by_storage[tensor.device, tensor.untyped_storage().data_ptr()].append(index)
        else:
            forms[index] = _form(tensors[index], -1, 0, _contiguous_stride(tensor.shape))
    for indices in by_storage.values():
        for group in _overlapping(plain, indices):
            block = first_block + len(blocks)
            first = plain[group[0]]
            begin, end = min(_span(plain[i])[0] for i in group), max(_span(plain[i])[1] for i in group)
            if len(group) == 1 and end - begin > first.nbytes:
                # A tensor with gaps, whose memory no other one shares, is copied without the gaps.
                blocks.append((first.nbytes, _writer(first)))
                forms[group[0]] = _form(tensors[group[0]], block, 0, _contiguous_stride(first.shape))
                continue
            # In a block that several dtypes view, the offset must be a whole number of elements of each.
            begin = begin // _LARGEST_ITEM_BYTES * _LARGEST_ITEM_BYTES
            blocks.append((end - begin, _source(first.untyped_storage(), begin, end)))
            for index in group:
                tensor = plain[index]
                offset = (_span(tensor)[0] - begin) // tensor.element_size()
                forms[index] = _form(tensors[index], block, offset, tensor.stride())
    return [form for form in forms if form is not None], blocks


def put_together(form: TensorForm, block: Any) -> torch.Tensor:
    """Build the tensor of a form on the CPU, in the memory of its block, which is a writable buffer."""
    storage = None if form.block < 0 else torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return in_storage(form, storage, torch.device("cpu"))


def in_storage(form: TensorForm, storage: torch.UntypedStorage | None, device: torch.device) -> torch.Tensor:
    """Build the tensor of a form.

    Args:
        form: the form.
        storage: the memory of its block; None for a tensor without elements.
        device: the device of that memory.
    """
    dtype = getattr(torch, form.dtype)
    if storage is None:
        tensor = torch.empty(form.shape, dtype=dtype, device=device)
    else:
        empty = torch.empty(0, dtype=dtype, device=device)
        tensor = empty.set_(storage, form.offset, form.shape, form.stride)
    if form.is_parameter:
        return torch.nn.Parameter(tensor, form.requires_grad)
    return tensor.requires_grad_(form.requires_grad)


def _form(tensor: torch.Tensor, block: int, offset: int, stride: Sequence[int]) -> TensorForm:
    """Return the form of a tensor with this offset and stride, in elements, in its block."""
    return TensorForm(
        block,
        str(tensor.dtype).removeprefix("torch."),
        offset,
        tuple(tensor.shape),
        tuple(stride),
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (first, last + 1) of the bytes of its storage that a tensor views."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + int(last + 1) * tensor.element_size()


def _overlapping(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> list[list[int]]:
    """Return the tensors of one storage, by index, in groups of overlapping ones."""
    groups: list[list[int]] = []
    end = -1
    for index in sorted(indices, key=lambda index: _span(tensors[index])):
        begin, tensor_end = _span(tensors[index])
        if begin < end:
            groups[-1].append(index)
        else:
            groups.append([index])
        end = max(end, tensor_end)
    return groups


def _source(storage: torch.UntypedStorage, begin: int, end: int) -> Source:
    """Return the source of a range of bytes of a storage."""
    part = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (end - begin,), (1,))
    return memoryview(part.numpy().data) if part.device.type == "cpu" else _writer(part)


def _writer(tensor: torch.Tensor) -> Source:
    """Return a function that writes the elements of a tensor, in C order, into a buffer."""

    def write(buffer: memoryview) -> None:
        torch.frombuffer(buffer, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return write
