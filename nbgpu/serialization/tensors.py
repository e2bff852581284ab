"""The form in which tensors travel in a parcel: their memory once, however many tensors view it.

This is the one module of both sides that needs torch. The notebook's kernel loads it only when a tensor
travels.
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
"""Bytes that can be sent as they are, or a function that writes them to a buffer."""


@dataclass(frozen=True)
class TensorForm:
    """Everything about a tensor except its bytes."""

    block: int
    """The number of its block of bytes, which it may share with other tensors; -1 where it has none."""
    dtype: str
    offset: int
    """The offset of its first element in the block, in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool


def is_plain(value: Any) -> bool:
    """Whether a value is a plain tensor. Other kinds, such as sparse tensors, pickle themselves as plain
    ones."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_quantized
    )


def take_apart(
    tensors: Sequence[torch.Tensor], first_block: int
) -> tuple[list[TensorForm], list[tuple[int, Source]]]:
    """(the forms of tensors, their blocks with sizes in bytes). The blocks are numbered from `first_block`.

    Tensors that share memory share a block. Only the part of a storage that the tensors view is sent.
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
        for together in _overlapping(plain, indices):
            block = first_block + len(blocks)
            # The block must begin at a whole element of every dtype that views it.
            begin = (
                min(_span(plain[index])[0] for index in together) // _LARGEST_ITEM_BYTES * _LARGEST_ITEM_BYTES
            )
            end = max(_span(plain[index])[1] for index in together)
            (first, *others) = (plain[index] for index in together)
            if not others and _span(first)[1] - _span(first)[0] > first.numel() * first.element_size():
                # The tensor has gaps, and no other one views its memory.
                blocks.append((first.numel() * first.element_size(), _writer(first)))
                forms[together[0]] = _form(tensors[together[0]], block, 0, _contiguous_stride(first.shape))
                continue
            blocks.append((end - begin, _source(first.untyped_storage(), begin, end)))
            for index in together:
                tensor = plain[index]
                offset = (_span(tensor)[0] - begin) // tensor.element_size()
                forms[index] = _form(tensors[index], block, offset, tensor.stride())
    return [form for form in forms if form is not None], blocks


def put_together(form: TensorForm, block: Any) -> torch.Tensor:
    """Build the tensor of a form on the CPU, in the memory of its block, which is a writable buffer."""
    storage = None if form.block < 0 else torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return in_storage(form, storage, torch.device("cpu"))


def in_storage(form: TensorForm, storage: torch.UntypedStorage | None, device: torch.device) -> torch.Tensor:
    """Build the tensor of a form in the memory of a block, which is on the device; None where the tensor has
    no elements."""
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
    """Describe a tensor that begins at an offset of a block, in elements, and has these strides there."""
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
    """(first, last + 1) of the bytes of its storage that a tensor views."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + int(last + 1) * tensor.element_size()


def _overlapping(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> list[list[int]]:
    """The tensors of one storage, grouped so that those which overlap are together."""
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
    part = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (end - begin,), (1,))
    return memoryview(part.numpy().data) if part.device.type == "cpu" else _writer(part)


def _writer(tensor: torch.Tensor) -> Source:
    def write(buffer: memoryview) -> None:
        torch.frombuffer(buffer, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return write
