"""Decoded volumes in one block of memory that a rank and its worker processes share.

torch sends tensors to another process through /dev/shm, with an open file for each: a container has 64 MiB
there, and a forkserver takes at most 250 files. Here the block is one memfd, which has no name in any folder
and is freed with the last process that maps it.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGN_BYTES = 64


class PackedVolumes:
    """Decoded volumes, which can be pickled for another process of the same user while this one lives.

    Args:
        volumes: tensors by name, and small values that are pickled as they are.
    """

    def __init__(self, volumes: Sequence[Mapping[str, Any]]) -> None:
        self._layout: list[dict[str, Any]] = []
        end = 0
        for volume in volumes:
            places: dict[str, Any] = {}
            for name, value in volume.items():
                if isinstance(value, Tensor):
                    places[name] = _TensorLayout(end, tuple(value.shape), value.dtype)
                    end = math.ceil((end + value.nbytes) / _ALIGN_BYTES) * _ALIGN_BYTES
                else:
                    places[name] = value
            self._layout.append(places)
        self._num_bytes = max(end, 1)
        descriptor = os.memfd_create("nbgpu-cache")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, self._num_bytes)
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._memory = self._mapped(shared=True)
        for index, volume in enumerate(volumes):
            for name, value in self[index].items():
                if isinstance(value, Tensor):
                    value.copy_(volume[name])

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            name: place.of(self._memory) if isinstance(place, _TensorLayout) else place
            for name, place in self._layout[index].items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A private mapping: a worker's accidental change stays in that worker.
        self._memory = self._mapped(shared=False)

    def _mapped(self, shared: bool) -> Tensor:
        return torch.from_file(self._path, shared=shared, size=self._num_bytes, dtype=torch.uint8)


class _TensorLayout:
    """The offset, shape and type of a tensor in the packed memory."""

    def __init__(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._begin = begin
        self._shape = shape
        self._dtype = dtype

    def of(self, memory: Tensor) -> Tensor:
        num_bytes = math.prod(self._shape) * self._dtype.itemsize
        return memory[self._begin : self._begin + num_bytes].view(self._dtype).view(self._shape)
