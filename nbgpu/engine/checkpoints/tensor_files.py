"""Writes and reads safetensors files one tensor at a time, so that no more than one has to be in memory.

The format is Hugging Face's (https://github.com/huggingface/safetensors): the length of the header in eight
bytes, the header as JSON, which has type, shape and place of each tensor, and the tensors' bytes one after
the other. Hugging Face's library cannot be used: it needs all tensors at once to write a file, and reads
through a private mapping of the whole file, which counts against a rank's memory limit (RLIMIT_DATA).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES_BY_NAME = {name: dtype for dtype, name in _TYPES.items()}
_LENGTH_BYTES = 8
"""The size of the field with the header's length. The header is padded to a multiple of it, for alignment."""


def has_name(dtype: torch.dtype) -> bool:
    """Return whether safetensors has a name for a dtype."""
    return dtype in _TYPES


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the order in which a file has them: the largest types first, so that each tensor
    begins at a multiple of its type's size."""
    return dict(sorted(tensors.items(), key=lambda named: -named[1].element_size()))


def pieces(tensors: Mapping[str, Tensor], next_whole: Callable[[], Tensor]) -> Iterator[memoryview]:
    """Yield the content of a file piece by piece: the header, and then each tensor's bytes.

    Args:
        tensors: by name, as `in_order` returns them; only types and shapes are used.
        next_whole: returns the next of the tensors, whole and on the CPU.

    Raises:
        ValueError: a tensor has a type that the format does not know.
    """
    yield memoryview(_header(tensors))
    for _ in tensors:
        yield _memory_view(next_whole())


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file, by name; each is read whenever it is asked for, and not kept.

    Args:
        path: a safetensors file, which is known to be one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            self._about: dict[str, dict[str, Any]] = json.loads(file.read(num_bytes))
        self._about.pop("__metadata__", None)
        self._begin = _LENGTH_BYTES + num_bytes

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor from the file, straight into its own memory."""
        about = self._about[name]
        tensor = torch.empty(about["shape"], dtype=_TYPES_BY_NAME[about["dtype"]], device="cpu")
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._begin + about["data_offsets"][0])
            unread = _memory_view(tensor)
            while unread:
                num_read = file.readinto(unread)
                if not num_read:
                    raise ValueError(f"{self._path} ends within {name}")
                unread = unread[num_read:]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._about)

    def __len__(self) -> int:
        return len(self._about)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a file: its length in eight bytes, and type, shape and place of each tensor as
    JSON."""
    unknown = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in _TYPES]
    if unknown:
        raise ValueError(f"safetensors has no type for {', '.join(unknown)}")
    about: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        about[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _memory_view(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU, or of a copy if it does not lie in one piece."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
